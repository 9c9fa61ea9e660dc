//! Environments in Python: `rlood env serve`, the examples, the guide's environment, and `POST /environments/test`.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rlood::commands::env_check::examine;
use rlood::commands::reward_check::Outcome;
use rlood::config::EnvCheckArgs;
use serde_json::{Value, json};

use crate::processes::{Server, binary, is_alive, register, signal};
use crate::server::SECRET;

/// The flags of a check of this server.
pub fn env_args(url: &str) -> EnvCheckArgs {
    EnvCheckArgs {
        url: url.to_owned(),
        secret: None,
        headers: Vec::new(),
        prompt: "Let us begin.".to_owned(),
        columns: Vec::new(),
        params: None,
        timeout_ms: 15_000,
        json: true,
        strict: false,
    }
}

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/environments")
}

/// Whether this machine has Python; says so if not.
pub fn has_python() -> bool {
    let has = Command::new("python3").arg("--version").stdout(Stdio::null()).status().is_ok();
    if !has {
        println!("skipped: there is no python3 on this machine");
    }
    has
}

/// A process that prints its address first; killed when dropped.
pub struct Serving {
    pub child: Child,
    /// The address, without a path.
    pub url: String,
    /// What it prints after the address.
    pub stanza: String,
}

impl Serving {
    /// Starts `rlood env serve` in a folder with these arguments.
    pub fn start(folder: &Path, arguments: &[&str]) -> Self {
        Self::start_with(folder, arguments, &[])
    }

    /// Starts `rlood env serve` with more variables.
    pub fn start_with(folder: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(binary());
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("RLOOD_")) {
            command.env_remove(name);
        }
        command.envs(variables.iter().copied());
        command.args(["env", "serve"]).args(arguments).current_dir(folder).env("RLOOD_ENV_SECRET", SECRET);
        Self::spawn(&mut command, true)
    }

    fn spawn(command: &mut Command, has_stanza: bool) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let first = lines.next().unwrap_or_else(|| panic!("{command:?} ended"));
        let url = first.strip_prefix("listening on ").unwrap_or_else(|| panic!("{first}")).to_owned();
        let stanza = if has_stanza { lines.next().unwrap() } else { String::new() };
        Self { child, url, stanza }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The child processes of a process, whichever of its threads started them.
pub fn children_of(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let texts = tasks.map(|task| std::fs::read_to_string(task.path().join("children")).unwrap_or_default());
    texts.flat_map(|text| text.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<u32>>()).collect()
}

/// The server passes without a failure or a warning.
async fn passes(url: &str, columns: &[&str], secret: Option<&str>) {
    let columns = columns.iter().map(|&column| column.to_owned()).collect();
    let args = EnvCheckArgs { columns, secret: secret.map(str::to_owned), ..env_args(url) };
    let report = examine(&args, false).await.unwrap();
    let bad: Vec<_> =
        report.findings.iter().filter(|f| matches!(f.outcome, Outcome::Failed | Outcome::Warning)).collect();
    assert!(bad.is_empty(), "{url}: {bad:#?}");
}

#[tokio::test]
async fn the_examples_pass_the_check_and_end_with_the_command() {
    if !has_python() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    for (target, columns, state) in [
        ("wordle.py:Wordle", &[][..], None),
        ("twenty_questions.py:TwentyQuestions", &[], Some(&state)),
        ("calculator.py:Calculator", &["answer=4"], None),
        ("code_runner.py:CodeRunner", &["output=4"], None),
    ] {
        let mut arguments = vec![target, "--listen", "127.0.0.1:0"];
        if let Some(state) = state {
            arguments.extend(["--state", state.to_str().unwrap()]);
        }
        let mut serving = Serving::start(&examples(), &arguments);
        let stanza: Value = serde_json::from_str(&format!("{{{}}}", serving.stanza)).unwrap();
        let url = stanza["environment"]["url"].as_str().unwrap().to_owned();
        assert!(url.starts_with(&serving.url) && stanza["environment"]["secret"].is_string(), "{stanza}");
        passes(&url, columns, Some(SECRET)).await;
        let server = children_of(serving.child.id());
        assert!(!server.is_empty());
        signal("TERM", serving.child.id());
        assert_eq!(serving.child.wait().unwrap().code(), Some(0));
        assert!(server.iter().all(|&pid| !is_alive(pid)), "{server:?}");
    }
    let guess = examples().join("guess_the_number.py");
    let guess = Serving::spawn(Command::new("python3").args([guess.to_str().unwrap(), "0"]), false);
    passes(&guess.url, &[], None).await;
}

#[test]
fn the_tests_of_the_examples_pass() {
    if !has_python() {
        return;
    }
    let mut command = Command::new("python3");
    command.args(["-m", "unittest", "-v", "test_environments"]).current_dir(examples());
    let output = command.env("PYTHONDONTWRITEBYTECODE", "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("Ran 13 tests"), "{text}");
}

#[test]
fn what_cannot_be_served_is_said_with_what_to_do() {
    if !has_python() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("game.py"), "class Empty:\n    pass\n").unwrap();
    for (arguments, code, part) in [
        (&["game.py"][..], 2, "names no class: must be FILE:CLASS, for example game.py:Wordle"),
        (&["nowhere.py:Wordle"], 2, "No such file"),
        (&["game.py:Wordle"], 1, "game.py has no class 'Wordle'; its classes are: Empty"),
        (&["game.py:Empty"], 1, "class 'Empty' has neither a method step(message) nor public methods"),
        (&["game.py:Empty", "--secret", "short"], 2, "--secret"),
    ] {
        let mut command = Command::new(binary());
        let output =
            command.args(["env", "serve", "--listen", "127.0.0.1:0"]).args(arguments).current_dir(dir.path()).output();
        let output = output.unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(code) && text.contains(part), "{arguments:?}: {text}");
    }
}

#[tokio::test]
async fn the_environment_in_the_guide_is_whole_and_passes() {
    if !has_python() {
        return;
    }
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guides/environments.md");
    let guide = std::fs::read_to_string(guide).unwrap();
    let (_, rest) = guide.split_once("```python\n").unwrap();
    let (code, _) = rest.split_once("```\n").unwrap();
    assert!(code.lines().count() <= 30, "a whole environment in 30 lines, not {}", code.lines().count());
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("game.py"), code).unwrap();
    let serving = Serving::start(dir.path(), &["game.py:HigherLower", "--listen", "127.0.0.1:0"]);
    passes(&format!("{}/HigherLower", serving.url), &[], Some(SECRET)).await;
}

const TALK: &str = r#"
class Talk:
    def reset(self, row, seed):
        return "Say it again, %s." % row.get("word", "you")

    def step(self, message):
        return "%d letters." % len(message["content"]), 0.5
"#;

/// The answer to a request for test episodes, also if it is an error.
async fn posted(server: &Server, body: &Value) -> Value {
    let answer = server.http.post(format!("{}/environments/test", server.url)).json(body).send().await.unwrap();
    answer.json().await.unwrap()
}

#[tokio::test]
async fn a_test_plays_episodes_with_a_model_and_says_what_is_wrong() {
    if !has_python() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    let request = |url: &str| {
        json!({"environment": {"url": url, "secret": SECRET, "max_turns": 3, "max_episode_tokens": 90},
               "rows": [{"prompt": "Play."}, {"prompt": [{"role": "user", "content": "Play on."}], "word": "crane"}],
               "sampling": {"max_completion_length": 8}, "seed": 3})
    };
    std::fs::write(dir.path().join("talk.py"), TALK).unwrap();
    let serving = Serving::start(dir.path(), &["talk.py:Talk", "--listen", "127.0.0.1:0"]);
    let url = format!("{}/Talk", serving.url);
    let none = posted(&server, &request(&url)).await;
    assert_eq!(none["errors"][0]["pointer"], "/model", "{none}");
    register(&server, "tiny", &Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny")).await;

    let played = posted(&server, &request(&url)).await;
    assert_eq!(
        (&played["ok"], &played["model"], &played["problems"]),
        (&json!(true), &json!("tiny"), &json!([])),
        "{played:#}"
    );
    let episodes = played["episodes"].as_array().unwrap();
    assert_eq!(episodes.len(), 2);
    for episode in episodes {
        assert!(episode["return"].is_number() && episode["opening"][0]["content"].is_string(), "{episode:#}");
        let turns = episode["turns"].as_array().unwrap();
        assert!(!turns.is_empty() && turns.len() <= 3 && turns[0]["num_tokens"].as_u64() >= Some(1));
    }
    let shown = played.to_string();
    assert!(!shown.contains(SECRET) && played["exchanges"].as_array().unwrap().len() >= 6, "{played:#}");
    // The same request gives the same episodes.
    let again = posted(&server, &request(&url)).await;
    assert_eq!(again["episodes"], played["episodes"]);
    let mut named = request(&url);
    named["model"] = json!("tiny");
    assert_eq!(posted(&server, &named).await["episodes"], played["episodes"]);

    // An environment that is not there, one that is refused, and a request that is not valid.
    let address = serving.url.strip_prefix("http://").unwrap().to_owned();
    drop(serving);
    while std::net::TcpStream::connect(&address).is_ok() {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let nobody = posted(&server, &request(&url)).await;
    assert_eq!((&nobody["ok"], &nobody["episodes"]), (&json!(false), &json!([])), "{nobody:#}");
    assert!(nobody["problems"][0].as_str().unwrap().contains("environment"), "{nobody:#}");
    let forbidden = posted(&server, &request("http://169.254.169.254/play")).await;
    assert_eq!(forbidden["errors"][0]["pointer"], "/environment", "{forbidden}");
    let mut unknown = request(&url);
    unknown["model"] = json!("huge");
    assert_eq!(posted(&server, &unknown).await["status"], 404);
    let mut long = request(&url);
    long["environment"]["max_episode_tokens"] = json!(100_000);
    assert_eq!(posted(&server, &long).await["errors"][0]["pointer"], "/rows");
}
