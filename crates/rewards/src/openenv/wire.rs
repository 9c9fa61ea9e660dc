//! The messages of OpenEnv's WebSocket, and what becomes of them in an episode.

use serde_json::{Map, Value, json};

use crate::environment::{EpisodeId, Reset};
use crate::tools::{answer_text, content_text};

/// The form of the actions of an environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ActionForm {
    /// The environment has tools (`list_tools`, `call_tool`).
    Tools,
    /// The model's text is this field of the action.
    Text(String),
}

/// An observation as the server sends it.
#[derive(Debug, PartialEq)]
pub(super) struct Observation {
    pub observation: Value,
    pub reward: Option<f64>,
    pub done: bool,
}

/// A message of the server that is no observation.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Problem {
    /// The server has no room for another episode.
    Full { max_sessions: Option<u64> },
    /// An error that the server reported.
    Reported { code: String, message: String },
    /// The message is not one of OpenEnv.
    Invalid(String),
}

/// Returns the form of an environment's actions from the JSON Schema that `GET /schema` gives. Fails with the reason.
pub(super) fn action_form(schema: &Value) -> Result<ActionForm, String> {
    let none = Map::new();
    let fields = schema["action"]["properties"].as_object().unwrap_or(&none);
    if fields.contains_key("tool_name") && fields.contains_key("arguments") {
        return Ok(ActionForm::Tools);
    }
    let is_text = |schema: &Value| schema["type"] == "string" && schema.get("const").is_none();
    let texts: Vec<&str> = fields.iter().filter(|(_, schema)| is_text(schema)).map(|(name, _)| name.as_str()).collect();
    match texts.as_slice() {
        [only] => Ok(ActionForm::Text((*only).to_owned())),
        several => Err(format!(
            "the model's text is one field of the action, and the environment's actions have {} (fields of type string: {}): name the field in environment.params.action_field",
            if several.is_empty() { "none" } else { "several" },
            several.join(", ")
        )),
    }
}

/// Returns the message that begins an episode: the row's columns, then the fields of `params.reset`, then seed and episode_id. The
/// server leaves out what the environment does not take.
pub(super) fn reset(reset: &Reset, params: &Map<String, Value>, name: &str, episode: &EpisodeId) -> String {
    let mut data = reset.columns.clone();
    if let Some(Value::Object(own)) = params.get("reset") {
        data.extend(own.clone());
    }
    // Many environments give the seed to generators that take 31 bits.
    data.insert("seed".to_owned(), json!(reset.seed & 0x7fff_ffff));
    data.insert("episode_id".to_owned(), json!(format!("{name}-{}", episode.attempt)));
    json!({"type": "reset", "data": data}).to_string()
}

/// Returns the message of an action.
pub(super) fn step(action: &Value) -> String {
    json!({"type": "step", "data": action}).to_string()
}

/// Reads a message of the server.
pub(super) fn read(body: &[u8]) -> Result<Observation, Problem> {
    let invalid = |why: String| Problem::Invalid(format!("the answer is not one of OpenEnv: {why}"));
    let message = crate::strict_json::read(body).map_err(|error| invalid(error.to_string()))?;
    let data = &message["data"];
    match message["type"].as_str() {
        Some("observation") => {}
        Some("error") => {
            let code = data["code"].as_str().unwrap_or("ERROR").to_owned();
            if code == "CAPACITY_REACHED" {
                return Err(Problem::Full { max_sessions: data["max_sessions"].as_u64() });
            }
            let message = data["message"].as_str().unwrap_or_default().chars().take(500).collect();
            return Err(Problem::Reported { code, message });
        }
        _ => return Err(invalid("type must be observation or error".to_owned())),
    }
    let reward = match &data["reward"] {
        Value::Null => None,
        Value::Bool(reward) => Some(f64::from(u8::from(*reward))),
        Value::Number(number) => number.as_f64(),
        _ => return Err(invalid("reward must be a number or null".to_owned())),
    };
    Ok(Observation { observation: data["observation"].clone(), reward, done: data["done"] == true })
}

/// Returns an observation as the model reads it: the text of `field`, or of the only field that is a text, or the whole as JSON.
pub(super) fn observation_text(observation: &Value, field: Option<&str>) -> String {
    if let Some(field) = field {
        return observation.get(field).map(answer_text).unwrap_or_default();
    }
    let Value::Object(fields) = observation else { return answer_text(observation) };
    let texts: Vec<&Value> = fields.values().filter(|value| value.is_string()).collect();
    match texts.as_slice() {
        [only] => answer_text(only),
        _ if fields.is_empty() => String::new(),
        _ => observation.to_string(),
    }
}

/// Returns the tools of an observation of `list_tools`, as function schemas of OpenAI's API.
pub(super) fn tools(observation: &Value) -> Vec<Value> {
    let tool = |tool: &Value| {
        let mut function = json!({"name": tool["name"]});
        if tool["description"].is_string() {
            function["description"] = tool["description"].clone();
        }
        let schema = tool.get("input_schema").or_else(|| tool.get("inputSchema"));
        if let Some(schema) = schema.filter(|schema| schema.is_object()) {
            function["parameters"] = schema.clone();
        }
        json!({"type": "function", "function": function})
    };
    observation["tools"].as_array().into_iter().flatten().map(tool).collect()
}

/// Returns the action that calls a tool.
pub(super) fn call(call: &Value) -> Value {
    let arguments = call["function"]["arguments"].as_str().unwrap_or("{}");
    let arguments: Value = serde_json::from_str(arguments).unwrap_or_else(|_| json!({}));
    json!({"type": "call_tool", "tool_name": call["function"]["name"], "arguments": arguments})
}

/// Returns the result of a call as the model reads it.
pub(super) fn call_text(observation: &Value) -> String {
    let error = &observation["error"];
    if !error.is_null() {
        return format!("error: {}", error["message"].as_str().unwrap_or("the tool failed"));
    }
    match observation.get("result") {
        Some(result) if result["content"].is_array() => content_text(result),
        Some(result) => answer_text(result),
        None => observation_text(observation, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_of_actions_follows_from_their_schema() {
        let form = |properties: Value| action_form(&json!({"action": {"properties": properties}}));
        assert_eq!(
            form(json!({"tool_name": {"type": "string"}, "arguments": {"type": "object"}})),
            Ok(ActionForm::Tools)
        );
        let word = json!({"guess": {"type": "string"}, "metadata": {"type": "object"}, "kind": {"type": "string", "const": "a"}});
        assert_eq!(form(word), Ok(ActionForm::Text("guess".to_owned())));
        let two = form(json!({"a": {"type": "string"}, "b": {"type": "string"}})).unwrap_err();
        assert!(two.contains("several") && two.contains("a, b") && two.contains("action_field"), "{two}");
        assert!(form(json!({"x": {"type": "integer"}})).unwrap_err().contains("none"));
    }

    #[test]
    fn observations_are_read_and_shown_as_text() {
        let good = json!({"type": "observation", "data": {"observation": {"echo": "hi", "n": 2}, "reward": null, "done": false}});
        let read_good = read(good.to_string().as_bytes()).unwrap();
        assert_eq!(read_good, Observation { observation: json!({"echo": "hi", "n": 2}), reward: None, done: false });
        assert_eq!(observation_text(&read_good.observation, None), "hi");
        assert_eq!(observation_text(&read_good.observation, Some("n")), "2");
        assert_eq!(observation_text(&json!({"a": "x", "b": "y"}), None), r#"{"a":"x","b":"y"}"#);
        assert_eq!(observation_text(&json!({}), None), "");
        let full = json!({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED", "max_sessions": 1}});
        assert_eq!(read(full.to_string().as_bytes()), Err(Problem::Full { max_sessions: Some(1) }));
        let paid = br#"{"type": "observation", "data": {"observation": {}, "reward": "1", "done": true}}"#;
        assert!(matches!(read(paid), Err(Problem::Invalid(_))));
        let won = br#"{"type": "observation", "data": {"observation": {}, "reward": true, "done": true}}"#;
        assert_eq!(read(won).unwrap().reward, Some(1.0));
        assert_eq!(call_text(&json!({"result": {"content": [{"type": "text", "text": "5"}]}, "error": null})), "5");
        assert_eq!(call_text(&json!({"result": null, "error": {"error_type": "x", "message": "no"}})), "error: no");
    }

    #[test]
    fn a_reset_has_the_columns_the_fixed_fields_and_the_seed() {
        let limits = crate::environment::EpisodeLimits { max_turns: 1, max_tokens: 1 };
        let columns = json!({"level": 1, "seed": "mine"}).as_object().unwrap().clone();
        let begin = Reset { seed: (5 << 31) + 7, messages: Vec::new(), columns, limits };
        let params = json!({"reset": {"level": 2}}).as_object().unwrap().clone();
        let message: Value =
            serde_json::from_str(&reset(&begin, &params, "ep_x", &EpisodeId { row: 0, index: 0, attempt: 1 })).unwrap();
        assert_eq!(message, json!({"type": "reset", "data": {"level": 2, "seed": 7, "episode_id": "ep_x-1"}}));
    }
}
