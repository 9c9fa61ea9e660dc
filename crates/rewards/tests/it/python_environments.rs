//! Tests of Python classes as environments: classes with `step`, classes of TRL's `environment_factory`, the state on disk, and what
//! goes wrong.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rlood_rewards::http_client::restricted_client_builder;
use rlood_rewards::python::{PythonError, PythonServer, Service, Settings, Target};
use rlood_rewards::signature::Key;
use serde_json::{Value, json};

use crate::adapters::loopback;

const SECRET: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

fn settings(file: &str, classes: &[&str], state: Option<&Path>) -> Settings {
    let classes = classes.iter().map(|&name| name.to_owned()).collect();
    let file = rlood_test_support::fixture("python_environments").join(file).canonicalize().unwrap();
    let service = Service::Environments { state: state.map(PathBuf::from), forget_after: Duration::from_secs(900) };
    Settings { service, secrets: vec![SECRET.to_owned()], ..Settings::new(vec![Target::of_file(&file, classes, None)]) }
}

/// Starts a server; `None`, with a message, if there is no Python.
fn started(settings: &Settings) -> Option<PythonServer> {
    match PythonServer::start(&TcpListener::bind("127.0.0.1:0").unwrap(), settings) {
        Ok(server) => Some(server),
        Err(PythonError::NoPython { tried }) => {
            println!("skipped: there is no Python on this machine ({tried})");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

async fn post_signed(server: &PythonServer, class: &str, body: &Value, secret: &str) -> (u16, String) {
    let (body, id) = (body.to_string(), body["id"].as_str().unwrap_or_default().to_owned());
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let signature = Key::parse(secret).unwrap().sign(&id, now, body.as_bytes());
    let client = restricted_client_builder(&loopback()).build().unwrap();
    let request = client.post(format!("http://{}/{class}", server.address)).header("webhook-id", &id);
    let request = request.header("webhook-timestamp", now.to_string()).header("webhook-signature", signature);
    let answer = request.header("content-type", "application/json").body(body).send().await.unwrap();
    (answer.status().as_u16(), answer.text().await.unwrap())
}

async fn post(server: &PythonServer, class: &str, body: &Value) -> (u16, String) {
    post_signed(server, class, body, SECRET).await
}

/// Posts a request and returns its answer, which must be good.
async fn good(server: &PythonServer, class: &str, body: &Value) -> Value {
    let (status, text) = post(server, class, body).await;
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&answer["version"], &answer["id"]), (&json!("1"), &body["id"]));
    answer
}

fn reset(episode: &str, columns: Value) -> Value {
    json!({"type": "env.reset.request", "version": "1", "id": format!("env_{episode}_reset"),
           "episode": {"id": episode, "attempt": 0, "seed": 17}, "columns": columns,
           "messages": [{"role": "user", "content": "Play."}], "limits": {"max_turns": 4, "max_tokens": 100}})
}

fn step(episode: &str, turn: u64, content: &str) -> Value {
    json!({"type": "env.step.request", "version": "1", "id": format!("env_{episode}_{turn}"),
           "episode": {"id": episode, "attempt": 0}, "turn": turn, "final": false,
           "message": {"role": "assistant", "content": content}, "text": content, "finish_reason": "stop"})
}

fn calls(episode: &str, turn: u64, calls: &[(&str, Value)]) -> Value {
    let call = |(index, (name, arguments)): (usize, &(&str, Value))| {
        json!({"id": format!("call_{turn}_{index}"), "type": "function",
               "function": {"name": name, "arguments": arguments.to_string()}})
    };
    let mut step = step(episode, turn, "");
    step["message"]["tool_calls"] = calls.iter().enumerate().map(call).collect();
    step
}

fn code(answer: &(u16, String)) -> (u16, String) {
    let body: Value = serde_json::from_str(&answer.1).unwrap();
    (answer.0, body["error"]["code"].as_str().unwrap_or_default().to_owned())
}

fn is(status: u16, code: &str) -> (u16, String) {
    (status, code.to_owned())
}

#[tokio::test]
async fn a_turn_is_answered_once_and_its_answer_repeated_and_errors_leave_no_trace() {
    let Some(server) = started(&settings("games.py", &["Guess", "Clock"], None)) else { return };
    assert_eq!(server.functions, ["Guess", "Clock"]);
    let ping = json!({"type": "env.ping", "version": "1", "id": "env_ping"});
    assert_eq!(good(&server, "Guess", &ping).await["tools"], json!([]));
    assert_eq!(code(&post(&server, "Guess", &step("ep_a", 0, "1")).await), is(404, "episode_lost"));
    let begin = reset("ep_a", json!({"name": "Ann"}));
    let begun = good(&server, "Guess", &begin).await;
    assert_eq!(begun["messages"], json!([{"role": "user", "content": "Guess, Ann: house"}]));
    assert_eq!(post(&server, "Guess", &begin).await.1, begun.to_string().replace("\":", "\": ").replace(",\"", ", \""));
    let first = post(&server, "Guess", &step("ep_a", 0, "1")).await;
    assert_eq!(post(&server, "Guess", &step("ep_a", 0, "1")).await, first, "the same bytes");
    assert!(first.1.contains("guess 1"), "{first:?}");
    // An exception is an HTTP error, and the next try has an object as it was before.
    for _ in 0..2 {
        let failed = post(&server, "Guess", &step("ep_a", 1, "boom")).await;
        assert_eq!(code(&failed), is(500, "exception"));
        assert!(failed.1.contains("the dice rolled off the table") && failed.1.contains("games.py"), "{failed:?}");
    }
    let second = good(&server, "Guess", &step("ep_a", 1, "2")).await;
    assert_eq!(second["messages"][0]["content"], "guess 2");
    assert_eq!(code(&post(&server, "Guess", &step("ep_a", 0, "1")).await), is(409, "out_of_order"));
    let mut other = step("ep_a", 1, "2");
    other["id"] = json!("env_other");
    assert_eq!(code(&post(&server, "Guess", &other).await), is(409, "out_of_order"));
    assert_eq!(code(&post(&server, "Guess", &begin).await), is(409, "out_of_order"));
    // Turns whose calls were not valid never reach a server, so numbers may be left out.
    let won = good(&server, "Guess", &step("ep_a", 3, "7")).await;
    assert_eq!((&won["reward"], &won["done"]), (&json!(1.0), &json!(true)));
    assert_eq!(code(&post(&server, "Guess", &step("ep_a", 4, "7")).await), is(409, "episode_over"));
    let close = json!({"type": "env.close.request", "version": "1", "id": "env_close",
                       "episode": {"id": "ep_a", "attempt": 0}, "reason": "env_done"});
    for _ in 0..2 {
        good(&server, "Guess", &close).await;
    }
    assert_eq!(code(&post(&server, "Guess", &step("ep_a", 3, "7")).await), is(404, "episode_lost"));
    // Another class, another attempt and another episode are apart.
    let mut again = begin.clone();
    again["episode"]["attempt"] = json!(1);
    assert_eq!(good(&server, "Guess", &again).await["messages"], begun["messages"]);
    assert_eq!(code(&post(&server, "Clock", &step("ep_a", 0, "1")).await), is(404, "episode_lost"));
    let last = {
        let mut last = step("ep_a", 0, "1");
        (last["episode"]["attempt"], last["final"]) = (json!(1), json!(true));
        good(&server, "Guess", &last).await
    };
    assert_eq!((&last["reward"], &last["done"]), (&json!(0.0), &json!(false)), "final is given by name");
    // An exception in a class that is no function of the messages: its turns cannot be played again.
    good(&server, "Clock", &reset("ep_c", json!({}))).await;
    good(&server, "Clock", &step("ep_c", 0, "x")).await;
}

/// Polls the `status_url` of a 202 until there is another status.
async fn polled(server: &PythonServer, accepted: &(u16, String)) -> (u16, String) {
    assert_eq!(accepted.0, 202, "{accepted:?}");
    let accepted: Value = serde_json::from_str(&accepted.1).unwrap();
    let url = format!("http://{}{}", server.address, accepted["status_url"].as_str().unwrap());
    let client = restricted_client_builder(&loopback()).build().unwrap();
    assert_eq!(client.get(&url).send().await.unwrap().status(), 401, "polls are signed");
    loop {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        let signature = Key::parse(SECRET).unwrap().sign("env_poll", now, b"");
        let request = client.get(&url).header("webhook-id", "env_poll").header("webhook-timestamp", now.to_string());
        let answer = request.header("webhook-signature", signature).send().await.unwrap();
        if answer.status() != 202 {
            return (answer.status().as_u16(), answer.text().await.unwrap());
        }
    }
}

#[tokio::test]
async fn a_slow_turn_is_accepted_and_answered_at_its_status_address_and_taken_once() {
    let Some(server) = started(&settings("games.py", &["Guess"], None)) else { return };
    let ping = json!({"type": "env.ping", "version": "1", "id": "env_ping"});
    assert_eq!(good(&server, "Guess", &ping).await["reply_modes"], json!(["sync", "async"]));
    for episode in ["ep_s", "ep_f"] {
        good(&server, "Guess", &reset(episode, json!({"name": "Ann"}))).await;
    }
    let (slow, failing) = (step("ep_s", 0, "slow 1"), step("ep_f", 0, "slow boom"));
    let (accepted, refused) = tokio::join!(post(&server, "Guess", &slow), post(&server, "Guess", &failing));
    let answer = polled(&server, &accepted).await;
    assert!(answer.0 == 200 && answer.1.contains("guess 1"), "{answer:?}");
    assert_eq!(post(&server, "Guess", &slow).await, answer, "the repeated request has the same bytes");
    assert_eq!(post(&server, "Guess", &slow).await, answer);
    assert_eq!(good(&server, "Guess", &step("ep_s", 1, "2")).await["messages"][0]["content"], "guess 2");
    // A failure is no answer: the client sends the request again and gets the error, and the server then tries the turn again.
    assert_eq!(code(&polled(&server, &refused).await), is(404, "exception"));
    assert_eq!(code(&post(&server, "Guess", &failing).await), is(500, "exception"));
    assert_eq!(good(&server, "Guess", &step("ep_f", 0, "1")).await["messages"][0]["content"], "guess 1");
}

#[tokio::test]
async fn requests_are_checked_and_answered_side_by_side() {
    let Some(server) = started(&settings("games.py", &["Guess"], None)) else { return };
    let begin = reset("ep_a", json!({"name": "Ann"}));
    let stranger = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";
    assert_eq!(post_signed(&server, "Guess", &begin, stranger).await.0, 401);
    let mut cases = vec![(json!([1]), 422), (json!({"type": "reward.ping", "id": "x"}), 422)];
    for (pointer, value) in [
        ("/version", json!("2")),
        ("/episode", json!("ep_a")),
        ("/episode/attempt", json!(-1)),
        ("/columns", json!([1])),
    ] {
        let mut changed = begin.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        cases.push((changed, 422));
    }
    let mut turn = step("ep_a", 0, "x");
    turn["turn"] = json!("0");
    cases.push((turn, 422));
    for (body, status) in cases {
        assert_eq!(post(&server, "Guess", &body).await.0, status, "{body}");
    }
    assert_eq!(post(&server, "Chess", &begin).await.0, 404);
    // The path may be left out if one class is served.
    good(&server, "", &begin).await;

    let begun = std::time::Instant::now();
    let names: Vec<String> = (0..8).map(|index| format!("ep_{index}")).collect();
    let play = |name: String| {
        let server = &server;
        async move {
            good(server, "Guess", &reset(&name, json!({"name": name}))).await;
            // The same turn twice at the same time is one turn.
            let slow = step(&name, 0, "sleep");
            let (one, two) = futures::join!(post(server, "Guess", &slow), post(server, "Guess", &slow));
            assert!(one == two && one.1.contains("guess 1"), "{one:?} {two:?}");
        }
    };
    futures::future::join_all(names.into_iter().map(play)).await;
    let seconds = begun.elapsed().as_secs_f64();
    assert!(seconds < 6.0, "8 episodes of 1 s took {seconds} s");
}

#[tokio::test]
async fn classes_of_trl_run_unchanged() {
    let Some(server) = started(&settings("trl_classes.py", &["Counter", "Painter"], None)) else { return };
    let begun = good(&server, "Counter", &reset("ep_a", json!({"start": 4}))).await;
    assert_eq!(begun["messages"], json!([{"role": "user", "content": "The counter is at 4."}]));
    let increment = json!({"type": "function", "function": {
        "name": "increment", "description": "Increments the counter.",
        "parameters": {"type": "object", "required": ["step"], "properties": {
            "step": {"type": "integer", "description": "The value to add to the counter."}}},
        "return": {"type": "integer", "description": "The new value."}}});
    let describe = json!({"type": "function", "function": {
        "name": "describe", "description": "Describes the counter.",
        "parameters": {"type": "object", "properties": {
            "style": {"type": "string", "enum": ["short", "long"], "description": "How to describe it."}}},
        "return": {"type": "string"}}});
    assert_eq!(begun["tools"], json!([describe, increment]));
    let called = calls(
        "ep_a",
        0,
        &[
            ("increment", json!({"step": 3})),
            ("describe", json!({"style": "long"})),
            ("increment", json!({"step": -1})),
            ("get_reward", json!({})),
            ("_hidden", json!({})),
            ("increment", json!({"stop": 1})),
        ],
    );
    let called = good(&server, "Counter", &called).await;
    let contents: Vec<&str> =
        called["messages"].as_array().unwrap().iter().map(|message| message["content"].as_str().unwrap()).collect();
    assert_eq!(contents[..2], ["7", "long: 7"]);
    assert_eq!(
        contents[2..5],
        [
            "{'error': 'steps must not be negative'}",
            "{'error': 'Tool get_reward not found.'}",
            "{'error': 'Tool _hidden not found.'}"
        ]
    );
    assert!(contents[5].contains("unexpected keyword argument"), "{contents:?}");
    for (index, message) in called["messages"].as_array().unwrap().iter().enumerate() {
        assert_eq!((&message["role"], &message["tool_call_id"]), (&json!("tool"), &json!(format!("call_0_{index}"))));
    }
    assert_eq!((&called["reward"], &called["done"]), (&Value::Null, &json!(false)));
    let over = good(&server, "Counter", &step("ep_a", 1, "It is 7.")).await;
    assert_eq!((&over["messages"], &over["reward"]), (&json!([]), &json!(0.7)));

    let begun = good(&server, "Painter", &reset("ep_b", json!({"color": "blue"}))).await;
    assert_eq!(begun["messages"], json!([]));
    let properties = &begun["tools"][0]["function"]["parameters"]["properties"];
    assert_eq!(properties["color"]["enum"], json!(["red", "blue"]));
    assert_eq!(
        properties["coats"],
        json!({"type": "integer", "nullable": true, "enum": [1, 2], "description": "Number of coats"})
    );
    assert_eq!(properties["spots"]["items"], json!({"type": "string"}));
    assert_eq!(properties["sizes"]["anyOf"][0], json!({"type": "object", "additionalProperties": {"type": "integer"}}));
    let mut last = calls("ep_b", 0, &[("paint", json!({"color": "blue"}))]);
    last["final"] = json!(true);
    let last = good(&server, "Painter", &last).await;
    assert_eq!((&last["messages"][0]["content"], &last["reward"]), (&json!("The wall is blue."), &json!(1.0)));
}

#[tokio::test]
async fn listed_methods_are_carried_out_and_other_calls_go_to_step() {
    let Some(server) = started(&settings("games.py", &["Toolbox", "Raw"], None)) else { return };
    let begun = good(&server, "Toolbox", &reset("ep_a", json!({}))).await;
    assert_eq!(begun["tools"][0]["function"]["name"], "look");
    assert_eq!(begun["tools"][0]["function"]["parameters"]["required"], json!(["at"]), "without self");
    let look = |at: &str| ("look", json!({ "at": at }));
    let looked = good(&server, "Toolbox", &calls("ep_a", 0, &[look("here"), look("nowhere")])).await;
    let contents: Vec<&Value> =
        looked["messages"].as_array().unwrap().iter().map(|message| &message["content"]).collect();
    assert_eq!(contents, ["dark", "{'error': 'there is no such place'}"]);
    assert_eq!((&looked["reward"], &looked["done"]), (&Value::Null, &json!(false)));
    let over = good(&server, "Toolbox", &step("ep_a", 1, "I am done.")).await;
    assert_eq!((&over["messages"][0]["content"], &over["reward"]), (&json!("seen: ['here']"), &json!(1.0)));
    // The calls of the last turn are carried out too, and step pays.
    good(&server, "Toolbox", &reset("ep_b", json!({}))).await;
    let mut last = calls("ep_b", 0, &[look("there")]);
    last["final"] = json!(true);
    let last = good(&server, "Toolbox", &last).await;
    assert_eq!((&last["messages"][0]["content"], &last["reward"]), (&json!("dark"), &json!(1.0)));

    good(&server, "Raw", &reset("ep_a", json!({}))).await;
    let raw = good(&server, "Raw", &calls("ep_a", 0, &[("raw", json!({"a": 1}))])).await;
    assert_eq!(raw["messages"], json!([{"role": "tool", "content": "{\"a\":1}", "tool_call_id": "call_0_0"}]));
}

#[tokio::test]
async fn what_a_class_returns_is_checked() {
    let Some(server) = started(&settings("games.py", &["Odd"], None)) else { return };
    for (column, part) in [("list", "messages[0] must have a role (system or user)"), ("number", "reset returned 3")] {
        let failed = post(&server, "Odd", &reset("ep_a", json!({"reset": column}))).await;
        assert!(failed.0 == 500 && failed.1.contains(part), "{failed:?}");
    }
    good(&server, "Odd", &reset("ep_a", json!({}))).await;
    for (content, part) in [
        ("text", "the reward is '1.0' (str), not a finite number"),
        ("number", "step returned 4"),
        ("field", "the field 'rewards'; known fields"),
        ("role", "messages[0] must have a role (tool or user)"),
    ] {
        let failed = post(&server, "Odd", &step("ep_a", 0, content)).await;
        assert!(failed.0 == 500 && failed.1.contains(part), "{content}: {failed:?}");
    }
    // TRL reads NaN as no reward.
    assert_eq!(good(&server, "Odd", &step("ep_a", 0, "nan")).await["reward"], Value::Null);
    let gym = good(&server, "Odd", &step("ep_a", 1, "gym")).await;
    assert_eq!(
        (&gym["messages"][0]["role"], &gym["reward"], &gym["done"]),
        (&json!("user"), &json!(0.5), &json!(true))
    );

    good(&server, "Odd", &reset("ep_b", json!({}))).await;
    let metrics = good(&server, "Odd", &step("ep_b", 0, "set")).await;
    assert_eq!(metrics["metrics"], json!({"moves": "{1}"}));
    let mut two = calls("ep_b", 1, &[("a", json!({})), ("b", json!({}))]);
    two["message"]["content"] = json!("calls");
    let two = good(&server, "Odd", &two).await;
    assert_eq!(two["reward"], json!(1.0));
    assert_eq!(
        two["messages"],
        json!([{"role": "tool", "content": "first", "tool_call_id": "call_1_0"},
               {"role": "tool", "content": "second", "tool_call_id": "call_1_1"}, {"role": "user", "content": "third"}])
    );
    let mut whole = calls("ep_b", 2, &[("a", json!({}))]);
    whole["message"]["content"] = json!("whole");
    assert_eq!(good(&server, "Odd", &whole).await["messages"][0]["tool_call_id"], "call_2_0");
}

#[tokio::test]
async fn an_episode_survives_a_kill_if_its_turns_are_on_disk_and_can_be_played_again() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let settings = settings("games.py", &["Guess", "Clock"], Some(&state));
    let Some(server) = started(&settings) else { return };
    let begin = reset("ep_a", json!({"name": "Ann"}));
    let begun = post(&server, "Guess", &begin).await;
    let first = post(&server, "Guess", &step("ep_a", 0, "1")).await;
    for body in [reset("ep_c", json!({})), step("ep_c", 0, "x")] {
        good(&server, "Clock", &body).await;
    }
    let refused = PythonServer::start(&TcpListener::bind("127.0.0.1:0").unwrap(), &settings);
    assert!(
        matches!(&refused, Err(PythonError::Failed { code, message }) if code == "state_in_use" && message.contains("--state")),
        "{refused:?}"
    );
    drop(server);

    // A record that was cut by the kill was never answered.
    let mut of_guess = std::fs::read_dir(&state).unwrap().map(|entry| entry.unwrap().path());
    let of_guess = of_guess.find(|path| std::fs::read_to_string(path).unwrap().contains("Ann")).unwrap();
    let mut file = std::fs::OpenOptions::new().append(true).open(&of_guess).unwrap();
    std::io::Write::write_all(&mut file, b"{\"request\": {\"type").unwrap();

    let server = started(&settings).unwrap();
    assert_eq!(post(&server, "Guess", &step("ep_a", 0, "1")).await, first, "the same bytes");
    let second = good(&server, "Guess", &step("ep_a", 1, "2")).await;
    assert_eq!(second["messages"][0]["content"], "guess 2", "the object is where it was");
    assert_eq!(code(&post(&server, "Guess", &begin).await), is(409, "out_of_order"));
    assert_eq!(begun.0, 200);
    let lines = std::fs::read_to_string(&of_guess).unwrap();
    assert_eq!(lines.lines().filter(|line| serde_json::from_str::<Value>(line).is_ok()).count(), 3);
    assert_eq!(lines.lines().count(), 3, "reset and two turns, each once");
    assert_eq!(code(&post(&server, "Clock", &step("ep_c", 1, "x")).await), is(404, "episode_lost"));
    let close = json!({"type": "env.close.request", "version": "1", "id": "env_close",
                       "episode": {"id": "ep_a", "attempt": 0}, "reason": "env_done"});
    good(&server, "Guess", &close).await;
    assert!(!of_guess.exists());
}

#[tokio::test]
async fn an_idle_episode_is_forgotten_and_comes_back_from_disk() {
    let dir = tempfile::tempdir().unwrap();
    for state in [None, Some(dir.path())] {
        let mut settings = settings("games.py", &["Guess"], state);
        if let Service::Environments { forget_after, .. } = &mut settings.service {
            *forget_after = Duration::from_millis(200);
        }
        let Some(server) = started(&settings) else { return };
        good(&server, "Guess", &reset("ep_a", json!({"name": "Ann"}))).await;
        tokio::time::sleep(Duration::from_millis(800)).await;
        let answer = post(&server, "Guess", &step("ep_a", 0, "1")).await;
        assert_eq!(answer.0, if state.is_some() { 200 } else { 404 }, "{answer:?}");
    }
}

#[test]
fn what_cannot_be_served_is_named() {
    for (class, code, part) in [
        ("Chess", "class_not_found", "its classes are: Guess, Clock, Odd, Toolbox, Raw, Nothing, Untyped, Broken"),
        ("time", "class_not_found", "'time' of games.py is no class, but module"),
        ("Nothing", "class_not_usable", "neither a method step(message)"),
        ("Untyped", "tool_not_usable", "argument 'where' of tool 'look' has no type hint"),
        ("Broken", "load_failed", "RuntimeError: no licence"),
    ] {
        match PythonServer::start(&TcpListener::bind("127.0.0.1:0").unwrap(), &settings("games.py", &[class], None)) {
            Err(PythonError::NoPython { .. }) => return,
            Err(PythonError::Failed { code: found, message }) => {
                assert!(found == code && message.contains(part), "{class}: {found} {message}");
            }
            other => panic!("{class}: {other:?}"),
        }
    }
}
