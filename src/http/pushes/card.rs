//! Writes the model card of a pushed checkpoint: YAML that the hub reads, then text. It contains no date, so that an unchanged push
//! has an unchanged card.

use std::fmt::Write;

use serde_json::{Value, json};

use super::super::summary::{Course, course};
use super::facts::{Base, Facts};
use crate::event::{Sample, SamplePhase};
use crate::export::ExportResult;
use crate::push::PushFormat;
use crate::spec::{Plan, ResumeGuarantee};
use crate::verdict::VerdictResult;

/// Width of a reward curve in characters.
const CURVE_WIDTH: usize = 48;
/// Ranks that vLLM accepts as `--max-lora-rank`.
const VLLM_RANKS: [u32; 8] = [8, 16, 32, 64, 128, 256, 320, 512];
/// Maximum length of a prompt or completion on a card, in characters.
const MAX_TEXT_CHARS: usize = 4000;

/// Returns the model card; `export` is that of a merged model.
pub(super) fn card(facts: &Facts, export: Option<&ExportResult>) -> String {
    let mut card = front_matter(facts);
    let parts = [
        heading(facts, export),
        loading(facts),
        training(facts),
        rewards(facts),
        facts.verdict.as_ref().map(verdict).unwrap_or_default(),
        samples(&facts.samples),
    ];
    for part in parts.iter().filter(|part| !part.is_empty()) {
        card.push('\n');
        card.push_str(part);
    }
    card
}

/// The YAML at the beginning. Its values are written as JSON, which is YAML too.
fn front_matter(facts: &Facts) -> String {
    let mut lines = Vec::new();
    let mut line = |key: &str, value: Value| lines.push(format!("{key}: {value}\n"));
    let is_adapter = facts.format == PushFormat::Adapter;
    if facts.base.commit.is_some() {
        line("base_model", json!(facts.base.name));
        line("base_model_relation", json!(if is_adapter { "adapter" } else { "finetune" }));
    }
    line("library_name", json!(if is_adapter { "peft" } else { "transformers" }));
    line("pipeline_tag", json!("text-generation"));
    let estimator = serde_json::to_value(facts.plan.rloo.estimator).unwrap_or_default();
    let mut tags = vec!["rlood".to_owned(), "reinforcement-learning".to_owned()];
    tags.extend(estimator.as_str().map(|name| name.replace('_', "-")));
    if facts.plan.lora.is_some() {
        tags.push("lora".to_owned());
    }
    line("tags", json!(tags));
    let mut datasets: Vec<&str> =
        facts.datasets.iter().filter(|dataset| dataset.hub.is_some()).map(|dataset| dataset.name.as_str()).collect();
    datasets.dedup();
    if !datasets.is_empty() {
        line("datasets", json!(datasets));
    }
    format!("---\n{}---\n", lines.concat())
}

fn heading(facts: &Facts, export: Option<&ExportResult>) -> String {
    let title = facts.repo.rsplit('/').next().unwrap_or_default();
    let what = match (facts.format, facts.plan.lora.is_some()) {
        (PushFormat::Adapter, _) => "A LoRA adapter for",
        (PushFormat::Merged, true) => "A LoRA adapter merged into",
        (PushFormat::Merged, false) => "A full fine-tuning of",
    };
    let mut text = format!(
        "# {title}\n\n{what} {}, trained by reinforcement learning with rlood {}: step {} of {}.\n",
        base_link(&facts.base),
        env!("CARGO_PKG_VERSION"),
        facts.checkpoint.step,
        facts.plan.totals.optimizer_steps,
    );
    if let Some(export) = export {
        let dtype = export.dtype.as_str();
        let survived = export.survived.map(|survived| survived.fraction * 100.0);
        let survived = survived.map(|percent| format!(" {percent:.0} % of the adapter's update survive the rounding."));
        let advice = export.advice.as_ref().map(|advice| format!(" Note: {advice}."));
        let _ = writeln!(text, "\nWeights in {dtype}.{}{}", survived.unwrap_or_default(), advice.unwrap_or_default());
    }
    text
}

fn base_link(base: &Base) -> String {
    match &base.commit {
        Some(commit) => format!("{} at commit `{commit}`", code(&base.name)),
        None => code(&base.name),
    }
}

fn loading(facts: &Facts) -> String {
    let Facts { repo, base, .. } = facts;
    let revision = match facts.revision.as_str() {
        "main" => String::new(),
        revision => format!(", revision={}", json!(revision)),
    };
    let flag = match facts.revision.as_str() {
        "main" => String::new(),
        revision => format!(" --revision {revision}"),
    };
    let name = json!(base.name);
    let unknown = if base.commit.is_none() { "  # the base model, which does not come from the hub" } else { "" };
    match facts.format {
        PushFormat::Adapter => {
            let ranks = facts.plan.lora.iter().flat_map(|lora| lora.rank_pattern.values().copied().chain([lora.r]));
            let rank = vllm_rank(ranks.max().unwrap_or_default());
            let title = repo.rsplit('/').next().unwrap_or_default();
            let shell_base = if base.commit.is_some() { base.name.as_str() } else { "BASE_MODEL" };
            let vllm = match flag.is_empty() {
                true => repo.clone(),
                false => "FOLDER_OF_THE_BRANCH".to_owned(),
            };
            format!(
                "## Load it\n\nPEFT:\n\n```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM, \
                 AutoTokenizer\n\nbase = {name}{unknown}\nmodel = AutoModelForCausalLM.from_pretrained(base)\nmodel = \
                 PeftModel.from_pretrained(model, {repo_text}{revision})\ntokenizer = AutoTokenizer.from_pretrained(base)\n```\n\n\
                 transformers (with PEFT installed) loads it as a part of the base model:\n\n```python\nmodel = \
                 AutoModelForCausalLM.from_pretrained(base)\nmodel.load_adapter({repo_text}{revision})\n```\n\nvLLM:\n\n```sh\nvllm serve \
                 {shell_base} --enable-lora --max-lora-rank {rank} --lora-modules {title}={vllm}\n```\n",
                repo_text = json!(repo),
            )
        }
        PushFormat::Merged => format!(
            "## Load it\n\ntransformers:\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\nmodel = \
             AutoModelForCausalLM.from_pretrained({repo_text}, dtype=\"auto\"{revision})\ntokenizer = \
             AutoTokenizer.from_pretrained({repo_text}{revision})\n```\n\nvLLM:\n\n```sh\nvllm serve {repo}{flag}\n```\n",
            repo_text = json!(repo),
        ),
    }
}

/// Returns the smallest `--max-lora-rank` of vLLM for adapters of a rank.
fn vllm_rank(rank: u32) -> u32 {
    VLLM_RANKS.into_iter().find(|accepted| *accepted >= rank).unwrap_or(rank)
}

fn training(facts: &Facts) -> String {
    let plan = &facts.plan;
    let mut text = "## Training\n\n".to_owned();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "- {name}: {value}");
    };
    let data: Vec<String> = facts
        .datasets
        .iter()
        .map(|dataset| match dataset.hub.as_deref() {
            Some(details) if !details.is_empty() => format!("{} ({})", code(&dataset.name), inline(details)),
            _ => code(&dataset.name),
        })
        .collect();
    line("Data", format!("{}; {} rows", data.join(", "), plan.dataset.num_rows));
    line("Rewards", reward_names(plan));
    let estimator = serde_json::to_value(plan.rloo.estimator).unwrap_or_default();
    line(
        "Method",
        format!(
            "{}, {} completions of each of {} prompts a step, KL coefficient {}, seed {}",
            estimator.as_str().unwrap_or("rloo"),
            plan.rloo.num_generations,
            plan.training.prompts_per_step,
            plan.rloo.beta,
            plan.training.seed
        ),
    );
    if let Some(lora) = &plan.lora {
        let modules: Vec<String> = lora.target_modules.iter().map(|module| code(module)).collect();
        let scaling = if lora.use_rslora { ", rsLoRA" } else { "" };
        line("LoRA", format!("rank {}, alpha {}{scaling}, on {}", lora.r, lora.alpha, modules.join(", ")));
    }
    if plan.training.four_bit().is_some() {
        line("Base in training", "quantized to 4 bits".to_owned());
    }
    if plan.runtime.load_in_8bit {
        line("Base in training", "quantized to 8 bits".to_owned());
    }
    if !plan.runtime.is_own() {
        line("Trainer", trainer(plan));
    }
    line("Learning rate", plan.optimizer.learning_rate.to_string());
    line("Completion length", format!("at most {} tokens", plan.sampling.max_completion_length));
    text
}

/// Names the program that trained in place of rlood's own engine, and what holds for interrupted runs.
fn trainer(plan: &Plan) -> String {
    let version = plan.runtime.versions.get("trl").map_or("", String::as_str);
    let devices = match plan.resources.devices {
        1 => "1 process".to_owned(),
        devices => format!("{devices} processes"),
    };
    let resumed = match plan.runtime.guarantees.resume {
        ResumeGuarantee::Exact | ResumeGuarantee::ExactCpu => "an interrupted run ends with the same bytes",
        ResumeGuarantee::Recorded => "an interrupted run repeats no completion, and its weights may differ in rounding",
    };
    format!("TRL {version}, {devices}; {resumed}")
}

/// Names, types and weights of the rewards. Their settings may contain addresses and secrets, and are left out.
fn reward_names(plan: &Plan) -> String {
    let name = |reward: &crate::spec::RewardPlan| {
        let kind = serde_json::to_value(&reward.kind).unwrap_or_default();
        let kind = kind["type"].as_str().unwrap_or_default().to_owned();
        let kind = if kind == reward.name { String::new() } else { format!(", type {}", code(&kind)) };
        format!("{} (weight {}{kind})", code(&reward.name), reward.weight)
    };
    plan.rewards.iter().map(name).collect::<Vec<_>>().join(", ")
}

fn rewards(facts: &Facts) -> String {
    let rows: Vec<(&str, SamplePhase, &str)> =
        vec![("Training", SamplePhase::Train, "reward"), ("Evaluation", SamplePhase::Eval, "eval_reward")];
    let mut table = String::new();
    let mut curves = String::new();
    for (name, phase, key) in rows {
        let Some(Course { first, last, best, best_step, .. }) = course(&facts.steps, phase, key) else { continue };
        let _ = writeln!(table, "| {name} | {first:.4} | {last:.4} | {best:.4} (step {best_step}) |");
        let values = facts.steps.iter().filter(|step| step.kind == phase);
        let values: Vec<f64> = values.filter_map(|step| step.metrics.get(key).copied().flatten()).collect();
        if values.len() > 1 {
            let _ = writeln!(curves, "{name:<10} {}", curve(&values));
        }
    }
    if table.is_empty() {
        return String::new();
    }
    let curves = if curves.is_empty() { curves } else { format!("\n```text\n{curves}```\n") };
    format!(
        "## Rewards\n\nMean reward up to step {}, the step of this checkpoint:\n\n| | first | last | best |\n|---|---|---|---|\n{table}{curves}",
        facts.checkpoint.step
    )
}

/// Draws values as a line of block characters, from the lowest to the highest.
fn curve(values: &[f64]) -> String {
    const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let width = CURVE_WIDTH.min(values.len());
    let column = |column: usize| {
        let (from, to) = (column * values.len() / width, (column + 1) * values.len() / width);
        let group = values.get(from..to).unwrap_or_default();
        group.iter().sum::<f64>() / group.len().max(1) as f64
    };
    let columns: Vec<f64> = (0..width).map(column).collect();
    let lowest = columns.iter().copied().fold(f64::INFINITY, f64::min);
    let highest = columns.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let block = |value: &f64| {
        let share = if highest > lowest { (value - lowest) / (highest - lowest) } else { 0.0 };
        BLOCKS.get((share * 7.0).round() as usize).copied().unwrap_or('▁')
    };
    columns.iter().map(block).collect()
}

fn verdict(verdict: &VerdictResult) -> String {
    let mut text = format!("## Compared with the base model\n\n{}\n", inline(&verdict.summary));
    if let Some(note) = &verdict.note {
        let _ = writeln!(text, "\nNote: {}.", inline(note).trim_end_matches('.'));
    }
    let test = &verdict.test;
    let interval = test.interval.map(|[low, high]| format!(", 95 % interval {low:.4} to {high:.4}"));
    let _ = writeln!(
        text,
        "\n{} rows: mean difference {:+.4}{}; won {}, lost {}, tied {}.",
        test.rows,
        test.difference,
        interval.unwrap_or_default(),
        test.won,
        test.lost,
        test.tied
    );
    text
}

fn samples(samples: &[Sample]) -> String {
    if samples.is_empty() {
        return String::new();
    }
    let mut text = "## Samples\n".to_owned();
    for Sample { step, prompt, completion, reward, .. } in samples {
        let reward = reward.map_or_else(|| "none".to_owned(), |reward| format!("{reward:.4}"));
        let _ = write!(text, "\nStep {step}, reward {reward}:\n\n{}\n{}", block(prompt), block(completion));
    }
    text
}

/// Formats a text as a block of its own, whatever it contains.
fn block(text: &str) -> String {
    let mut shown: String = text.chars().take(MAX_TEXT_CHARS).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    let longest = shown.split(|c| c != '`').map(str::len).max().unwrap_or_default();
    let fence = "`".repeat(longest.max(2) + 1);
    format!("{fence}text\n{shown}\n{fence}\n")
}

/// Formats a name as code, whatever it contains.
fn code(name: &str) -> String {
    format!("`{}`", inline(name).replace('`', "'"))
}

/// Replaces line breaks and other control characters, so that a text stays in its line.
fn inline(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_has_a_block_for_each_group_of_steps() {
        assert_eq!(curve(&[0.0, 0.5, 1.0]), "▁▅█");
        assert_eq!(curve(&[2.0, 2.0]), "▁▁");
        let rising: Vec<f64> = (0..1000).map(f64::from).collect();
        let curve = curve(&rising);
        assert_eq!(curve.chars().count(), CURVE_WIDTH);
        assert!(curve.starts_with('▁') && curve.ends_with('█'), "{curve}");
    }

    #[test]
    fn texts_and_names_stay_inside_their_block_and_line() {
        assert_eq!(block("a```b"), "````text\na```b\n````\n");
        assert_eq!(block("plain"), "```text\nplain\n```\n");
        assert!(block(&"ä".repeat(MAX_TEXT_CHARS + 1)).ends_with("ä…\n```\n"));
        assert_eq!(code("a`b\n# c"), "`a'b # c`");
    }

    #[test]
    fn the_rank_for_vllm_is_one_that_it_accepts() {
        assert_eq!([1, 8, 9, 257, 600].map(vllm_rank), [8, 8, 16, 320, 600]);
    }
}
