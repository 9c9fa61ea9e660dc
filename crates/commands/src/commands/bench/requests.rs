//! Generation of many concurrent requests of different lengths, as inference servers are benchmarked.

use serde::{Deserialize, Serialize};

use super::decode::{device_peak_mib, peak_mib, policy};
use super::timing::{Timing, repeat_reporting};
use super::{BenchError, Setting};
use crate::engine::model::{Adapter, Choice, Pick, Policy};
use crate::engine::random::{Key, Stream};
use crate::engine::sampling::Filters;

/// Results of generating all requests.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RequestFigures {
    /// Number of concurrent requests.
    pub requests: usize,
    /// Total number of prompt tokens.
    pub prompt_tokens: u64,
    /// Total number of completion tokens.
    pub completion_tokens: u64,
    /// Number of decode steps, which is the length of the longest completion in tokens.
    pub decode_steps: u64,
    /// Total number of cached tokens that the decode steps attend to: their keys and values are read once each.
    pub attended_tokens: u64,
    /// Whether any repetition was measured; false = the figures are those of the warm-up run.
    pub warm: bool,
    /// Number of measured repetitions.
    pub repetitions: usize,
    /// Seconds from the first prefill to the last token, in the fastest repetition.
    pub seconds: f64,
    /// Median duration in seconds.
    pub median_seconds: f64,
    /// Completion tokens per second of the fastest repetition.
    pub tok_s: f64,
    /// Peak memory of the process, in MiB.
    pub peak_mib: f64,
    /// Peak memory of the GPU in MiB; None on the CPU.
    pub device_peak_mib: Option<f64>,
}

/// One request: its number of prompt tokens and of completion tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Lengths(usize, usize);

/// Reads the lengths from a file: a JSON array of [prompt, completion].
///
/// # Errors
/// Fails when the file does not exist, is not such an array, or a length is 0.
pub fn read(setting: &Setting<'_>) -> Result<Vec<Lengths>, BenchError> {
    let path = setting.args.requests.as_ref();
    let path = path
        .ok_or_else(|| BenchError::Job("the benchmark's part `requests` needs the flag --requests FILE".to_owned()))?;
    let text = std::fs::read_to_string(path).map_err(super::io(format!("read {}", path.display())))?;
    parse(&text).map_err(|detail| BenchError::Job(format!("--requests {}: {detail}", path.display())))
}

fn parse(text: &str) -> Result<Vec<Lengths>, String> {
    let lengths: Vec<Lengths> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    match lengths.iter().position(|Lengths(prompt, completion)| *prompt == 0 || *completion == 0) {
        Some(index) => Err(format!("request {index} in the list has the length 0, which must be at least 1")),
        None if lengths.is_empty() => Err("the list of requests is empty".to_owned()),
        None => Ok(lengths),
    }
}

/// Runs all requests, `--steps` times.
///
/// # Errors
/// Fails when there are no lengths, or the engine fails.
pub fn measure(setting: &Setting<'_>) -> Result<RequestFigures, BenchError> {
    let lengths = read(setting)?;
    let policy = policy(setting)?;
    let prompts: Vec<Vec<u32>> =
        lengths.iter().zip(0..).map(|(Lengths(prompt, _), request)| setting.tokens(request, *prompt)).collect();
    let completion_tokens: usize = lengths.iter().map(|Lengths(_, completion)| completion).sum();
    let figures = |timing: Timing| RequestFigures {
        requests: lengths.len(),
        prompt_tokens: lengths.iter().map(|Lengths(prompt, _)| *prompt as u64).sum(),
        completion_tokens: completion_tokens as u64,
        decode_steps: lengths.iter().map(|Lengths(_, completion)| *completion as u64).max().unwrap_or(0),
        attended_tokens: lengths.iter().map(|lengths| attended(*lengths)).sum(),
        warm: timing.warm(),
        repetitions: timing.repetitions,
        seconds: timing.min_s,
        median_seconds: timing.median_s,
        tok_s: completion_tokens as f64 / timing.min_s,
        peak_mib: peak_mib(),
        device_peak_mib: device_peak_mib(&policy),
    };
    let decode = || decode_all(&policy, &prompts, &lengths);
    let timing =
        repeat_reporting(setting.args.steps as usize, 0.0, decode, |timing| setting.report_figures(&figures(timing)))?;
    Ok(figures(timing))
}

/// Returns the sum of context lengths over a request's decode steps. Prefill gives the first token, and each later token needs
/// a step that attends to all tokens before it.
fn attended(Lengths(prompt, completion): Lengths) -> u64 {
    let steps = completion as u64 - 1;
    steps * prompt as u64 + steps * (steps + 1) / 2
}

/// Prefills, then decodes one token per step for every request that has not reached its length.
fn decode_all(policy: &Policy, prompts: &[Vec<u32>], lengths: &[Lengths]) -> Result<(), BenchError> {
    let mut state = policy.begin(Adapter::On);
    let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    let longest = lengths.iter().map(|Lengths(_, completion)| *completion).max().unwrap_or(1);
    policy.join(&mut state, &prompts, 1, longest)?;
    let key = Key::new(0, Stream::Train);
    // The requests that still generate, as (request number, number of remaining tokens).
    let mut live: Vec<(u64, usize)> =
        lengths.iter().zip(0..).map(|(Lengths(_, completion), request)| (request, *completion)).collect();
    let pick = |&(request, left): &(u64, usize)| Pick {
        temperature: 1.0,
        uniform: key.with(request).with(left as u64).uniform(),
    };
    let (mut chosen, mut picks) = (Vec::new(), live.iter().map(pick).collect::<Vec<Pick>>());
    while !live.is_empty() {
        policy.choose_into(&state, plain(&picks), &mut chosen)?;
        let keep: Vec<bool> = live.iter().map(|(_, left)| *left > 1).collect();
        let kept = |index: &usize| keep[*index];
        let tokens: Vec<u32> = (0..live.len()).filter(kept).map(|index| chosen[index].token).collect();
        let next: Vec<(u64, usize)> =
            (0..live.len()).filter(kept).map(|index| (live[index].0, live[index].1 - 1)).collect();
        if next.len() < live.len() {
            policy.retain(&mut state, &keep)?;
        }
        live = next;
        picks = live.iter().map(pick).collect();
        policy.append_and_pick(&mut state, &tokens, plain(&picks))?;
        if policy.decodes_ahead() && live.iter().all(|(_, left)| *left > 1) {
            let later: Vec<Pick> = live.iter().map(|(request, left)| pick(&(*request, left - 1))).collect();
            policy.append_ahead(&mut state, plain(&later))?;
        }
    }
    Ok(())
}

/// Samples from the whole vocabulary, without top-k or top-p.
fn plain(picks: &[Pick]) -> Choice<'_> {
    Choice { picks, filters: Filters::OFF }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_attends_to_what_came_before_each_of_its_later_tokens() {
        // A prompt of five tokens and three generated ones: the second attends to 5 + 1 tokens, the third to 5 + 2.
        assert_eq!(attended(Lengths(5, 3)), 13);
        assert_eq!(attended(Lengths(9, 1)), 0);
    }

    #[test]
    fn lengths_are_pairs_above_zero() {
        assert_eq!(parse("[[3, 4], [1, 1]]").unwrap(), [Lengths(3, 4), Lengths(1, 1)]);
        for (text, part) in
            [("[]", "list of requests is empty"), ("[[3, 0]]", "request 0"), ("[[3]]", "invalid"), ("{}", "invalid")]
        {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
