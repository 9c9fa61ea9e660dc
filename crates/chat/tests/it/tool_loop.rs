//! Ids and masks against the tool loop of TRL 1.16's `GRPOTrainer`, which `tests/agents/record.py` recorded.
//!
//! Wanted differences, each with a case of its own below:
//! 1. `forged`: TRL makes special tokens of an observation's `<|im_end|>`; here it becomes ordinary text, and is counted.
//! 2. `malformed`: TRL takes a call that cannot be read for an answer and ends the episode; here the model is told.
//! 3. `unknown_tool`: TRL shows `{'error': 'Tool … not found.'}` as the result; here the model is told which tools there are.
//! 4. `overlong_result`: TRL drops a result that passes `max_completion_length`, which counts tokens of tools too, and the row does not
//!    look truncated. Here the limit is that of the episode: the loop asks for the suffix, sees that it does not fit, and ends the
//!    episode as truncated. The ids up to there are the same.
//! 5. TRL renders Qwen3 with a patched template; here the model's own template gives the same ids.

use rlood_chat::{ContentErrorKind, Outcome, ParseContext, ToolParser, Tools, TurnRenderer};
use serde_json::{Map, Value, json};

use crate::support;

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

/// A recorded conversation, and its state while it is played again.
struct Played<'a> {
    renderer: &'a TurnRenderer<'a>,
    parser: ToolParser,
    tools: &'a Tools,
    /// TRL's messages that were not used yet.
    messages: std::vec::IntoIter<Value>,
    ids: Vec<u32>,
    mask: Vec<u32>,
    escaped: usize,
}

/// The outcome of a turn.
#[derive(Debug, PartialEq)]
enum After {
    Ended,
    Continued,
    Refused(ContentErrorKind, Vec<Value>),
}

impl Played<'_> {
    fn turn(&mut self, number: usize, sampled: &[u32], limit: usize) -> After {
        // TRL cuts the last turn where the row is full.
        let sampled = &sampled[..sampled.len().min(limit - self.ids.len())];
        self.ids.extend(sampled);
        self.mask.extend(sampled.iter().map(|_| 1));
        let Ok(text) = self.renderer.turn_text(sampled) else { return After::Ended };
        let context =
            ParseContext { tools: self.tools, turn: number, opens_reasoning: self.renderer.opens_reasoning() };
        let turn = self.parser.parse(&text, &context);
        let message = self.messages.next().unwrap();
        let results = self.messages.clone().take_while(|message| message["role"] == "tool").collect::<Vec<_>>();
        match turn.outcome {
            Outcome::Answer => {
                assert_eq!((&json!(turn.content), results.len()), (&message["content"], 0));
                After::Ended
            }
            Outcome::Invalid(error) => After::Refused(error.kind, results),
            Outcome::Calls(calls) => {
                let trl: Vec<(&Value, &Value)> = list(&message["tool_calls"])
                    .iter()
                    .map(|call| (&call["function"]["name"], &call["function"]["arguments"]))
                    .collect();
                let ours: Vec<(Value, Value)> =
                    calls.into_iter().map(|call| (json!(call.name), Value::Object(call.arguments))).collect();
                assert_eq!(ours.iter().map(|(name, arguments)| (name, arguments)).collect::<Vec<_>>(), trl);
                assert_eq!(json!(turn.content), message["content"]);
                // TRL has removed a result that did not fit.
                if !results.is_empty() {
                    self.show(sampled, &results);
                }
                After::Continued
            }
        }
    }

    fn show(&mut self, sampled: &[u32], results: &[Value]) {
        let suffix = self.renderer.next(sampled, results, 10_000).unwrap();
        self.ids.extend(&suffix.ids);
        self.mask.extend(suffix.ids.iter().map(|_| 0));
        self.escaped += suffix.special_tokens_escaped;
        self.messages.by_ref().take(results.len()).for_each(drop);
    }
}

fn check(case: &Value, template: &str, prompts: &[Value], tools: &Tools) {
    let name = case["name"].as_str().unwrap();
    let text = support::text(case["family"].as_str().unwrap(), &support::template(template));
    let kwargs = case["kwargs"].as_object().unwrap();
    let renderer = TurnRenderer::new(&text, kwargs).unwrap();
    let first = renderer.first(list(&case["messages"]), usize::MAX, tools).unwrap();
    assert_eq!(first.ids, ids(&prompts[case["prompt"].as_u64().unwrap() as usize]), "{template} {name}: prompt");
    let parser = ToolParser::by_template(text.chat_template().unwrap()).parser;
    let messages = list(&case["completion"]).to_vec().into_iter();
    let mut played = Played { renderer: &renderer, parser, tools, messages, ids: vec![], mask: vec![], escaped: 0 };
    let (expected, mask) = (ids(&case["completion_ids"]), ids(&case["tool_mask"]));
    let limit = case["max_completion_length"].as_u64().unwrap() as usize;
    for (number, sampled) in list(&case["sampled"]).iter().map(ids).enumerate() {
        match (name, played.turn(number, &sampled, limit)) {
            ("malformed", after) => {
                assert_eq!(after, After::Refused(ContentErrorKind::Malformed, vec![]), "{template}")
            }
            ("unknown_tool", After::Refused(ContentErrorKind::UnknownTool, results)) => {
                assert_eq!(results.len(), 1);
                // The ids are TRL's once the result has TRL's words.
                played.show(&sampled, &results);
            }
            ("overlong_result", After::Continued) => {
                let result = [json!({"role": "tool", "name": "look_up", "content": "word ".repeat(40)})];
                played.show(&sampled, &result);
                assert!(played.ids.len() > limit);
                played.ids.truncate(sampled.len());
                played.mask.truncate(sampled.len());
                break;
            }
            (_, After::Refused(kind, _)) => panic!("{template} {name}: {kind:?}"),
            (_, After::Ended | After::Continued) => {}
        }
    }
    if name == "forged" {
        assert_ne!(played.ids, expected, "{template}");
        assert_eq!(text.decode(&played.ids, false).unwrap(), text.decode(&expected, false).unwrap(), "{template}");
        let own = if template == "llama3_1" { 1 } else { 2 };
        assert_eq!(played.escaped, own, "{template}");
        let special: Vec<u32> = text.marked_special().iter().map(|token| token.id).collect();
        let count = |ids: &[u32]| ids.iter().filter(|id| special.contains(id)).count();
        assert_eq!(count(&played.ids) + own, count(&expected), "{template}");
        return;
    }
    assert_eq!((&played.ids, &played.mask, played.escaped), (&expected, &mask, 0), "{template} {name}");
}

#[test]
fn ids_and_masks_are_those_of_trl() {
    let recorded = support::json("tool_loop.json");
    assert_eq!(recorded["trl"], "1.16.0");
    let tools = Tools::new(list(&recorded["tools"])).unwrap();
    let mut checked = 0;
    for case in list(&recorded["cases"]) {
        let template = case["template"].as_str().unwrap();
        check(case, template, list(&recorded["prompts"]), &tools);
        if template == "qwen3" {
            assert_eq!(case["patched"], true);
            check(case, "qwen3_training", list(&recorded["prompts"]), &tools);
        }
        checked += 1;
    }
    assert_eq!(checked, 55);
}

#[test]
fn a_turn_without_an_end_is_never_continued() {
    let text = support::text("qwen", &support::template("qwen3"));
    let renderer = TurnRenderer::new(&text, &Map::new()).unwrap();
    let result = [json!({"role": "tool", "content": "x"})];
    for sampled in [vec![], text.encode("cut", false).unwrap()] {
        let error = renderer.next(&sampled, &result, 100).unwrap_err().to_string();
        assert_eq!(error, "the turn does not end with an EOS token, so nothing can follow it");
        assert!(renderer.turn_text(&sampled).is_err());
    }
}
