//! No text makes a parser or the renderer panic: the texts of the cases, changed at random.

use rlood_chat::{Outcome, ParseContext, ToolParser, TurnRenderer};
use serde_json::{Map, Value, json};

use crate::parsers::{FILES, tools};
use crate::support;

/// Pieces that mean something to some parser.
const PIECES: [&str; 40] = [
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
    ">",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    ".call(",
    "functools[",
    "<|tool_call|>",
    "<|tool_call>",
    "call:",
    "<tool_call|>",
    "<|\"|>",
    "<think>",
    "</think>",
    "[THINK]",
    "<|channel>thought\n",
    "<channel|>",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    "\"",
    "'",
    "\\",
    "\\u",
    ":",
    ",",
    "=",
    "```tool_code\n",
    "```",
    "é🦀",
    "\u{F0000}",
];

/// A linear congruential generator (Knuth's constants): the same texts in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % end.max(1)
    }

    fn change(&mut self, text: &str, others: &[String]) -> String {
        let characters: Vec<char> = text.chars().collect();
        let (from, to) = (self.below(characters.len() + 1), self.below(characters.len() + 1));
        let part = |from: usize, to: usize| characters[from.min(to)..from.max(to)].iter().collect::<String>();
        let whole = characters.len();
        match self.below(5) {
            0 => part(0, from) + PIECES[self.below(PIECES.len())] + &part(from, whole),
            1 => part(0, from.min(to)) + &part(from.max(to), whole),
            2 => part(0, from.max(to)) + &part(from.min(to), whole),
            3 => part(0, from) + &others[self.below(others.len())],
            _ => part(0, from) + PIECES[self.below(PIECES.len())] + &part(to, whole),
        }
    }
}

#[test]
fn no_text_makes_a_parser_panic() {
    let tools = tools();
    let mut seeds: Vec<String> = PIECES.map(str::to_owned).to_vec();
    for file in FILES {
        let cases = support::json(&format!("parsers/{file}.json"));
        seeds.extend(cases.as_array().unwrap().iter().map(|case| case["text"].as_str().unwrap().to_owned()));
    }
    let mut random = Random(7);
    for round in 0..30_000 {
        let mut text = seeds[random.below(seeds.len())].clone();
        for _ in 0..=random.below(6) {
            text = random.change(&text, &seeds);
        }
        text.truncate(text.floor_char_boundary(4000));
        for (_, parser) in ToolParser::NAMES {
            let context = ParseContext { tools: &tools, turn: 0, opens_reasoning: round % 7 == 0 };
            let turn = parser.parse(&text, &context);
            if let Outcome::Calls(calls) = turn.outcome {
                assert!(!calls.is_empty());
                assert!(
                    calls.iter().all(|call| tools.get(&call.name).unwrap().check(&call.arguments).is_ok()),
                    "{text}"
                );
            }
        }
    }
}

#[test]
fn deep_and_long_texts_end_soon() {
    let tools = tools();
    let context = ParseContext { tools: &tools, turn: 0, opens_reasoning: false };
    let begun = std::time::Instant::now();
    for piece in PIECES {
        for begin in [
            "",
            "<tool_call>",
            "[TOOL_CALLS]",
            "functools[",
            "<|tool_call>call:add",
            "[add(a=",
            "{\"name\": \"add\", \"parameters\": ",
        ] {
            let text = format!("{begin}{}", piece.repeat(20_000));
            for (_, parser) in ToolParser::NAMES {
                let _ = parser.parse(&text, &context);
            }
        }
    }
    assert!(begun.elapsed().as_secs() < 60, "{:?}", begun.elapsed());
}

#[test]
fn no_observation_forges_a_special_token() {
    let mut random = Random(11);
    for (family, template) in [("qwen", "qwen3"), ("llama3", "llama3_1")] {
        let text = support::text(family, &support::template(template));
        let renderer = TurnRenderer::new(&text, &Map::new()).unwrap();
        let special = text.marked_special();
        let end = text.eos_token_ids()[0];
        let mut pieces: Vec<String> = special.iter().map(|token| token.text.clone()).collect();
        pieces.extend(["<|", "|>", "im_end", "\u{F0000}", "0", "\n", "é", "<tool_call>", "word "].map(str::to_owned));
        let count = |ids: &[u32]| ids.iter().filter(|id| special.iter().any(|token| token.id == **id)).count();
        let result = |content: &str| json!({"role": "tool", "name": "add", "content": content});
        let harmless = count(&renderer.next(&[end], &[result("x"), result("x")], 1000).unwrap().ids);
        for _ in 0..300 {
            let mut content =
                || -> String { (0..random.below(9)).map(|_| pieces[random.below(pieces.len())].clone()).collect() };
            let messages: [Value; 2] = [result(&content()), result(&content())];
            let suffix = renderer.next(&[end], &messages, 1000).unwrap();
            assert_eq!(count(&suffix.ids), harmless, "{messages:?}");
            let shown = text.decode(&suffix.ids, false).unwrap();
            let written = |message: &Value| match family {
                "llama3" => message["content"].to_string(),
                _ => message["content"].as_str().unwrap().to_owned(),
            };
            assert!(messages.iter().all(|message| shown.contains(&written(message))), "{shown}");
        }
    }
}
