//! Generates the reference page `docs/reference/job-settings.md` from the tables.

use serde_json::Value;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{Object, Schema};

use super::{DefaultValue, Kind, Resume, SECTIONS, Section, Setting, Trl, Values};

const HEAD: &str = "# Job settings

This page is generated from the tables in `crates/types/src/spec/settings`, which the server uses to read jobs. After a change
there, run `RLOOD_BLESS=1 cargo test --release -p rlood-types the_reference_page`.

Each section is an object in the job: `{\"rloo\": {\"beta\": 0.1}}`. A setting that is missing or null has its default. A
section marked *optional* applies only if it is given; the others always apply, and `\"lora\": null` turns the adapter off.
In addition to its sections, a job has `model`, `dataset`, `rewards` ([rewards](../concepts/rewards.md)), `name`, `metadata` and `priority`.
A Python function with TRL's signature is the reward `{\"type\": \"python\", \"file\": \"rewards.py\", \"function\": \"accuracy\"}`
([Python functions](../guides/python-rewards.md)).

- **TRL**: the key of `RLOOConfig`, or of the arguments around it, from which `rlood convert --trl` and
  `POST /jobs/validate?from=trl` take the setting, and TRL's default where it is written out.
- **Fork**: *same* marks settings that a fork must not change if it is to resume from a checkpoint with its optimizer state.
  With a different value, the fork is a warm start: from the checkpoint's weights, at step 0. In the middle of a generation block, all
  of `rloo`, `sampling.temperature` and the rewards must be the same as well.
";

/// Notes that follow the table of a section.
const NOTES: [(&str, &str); 2] = [("warm_up", "
- A row has either chat messages that end with an assistant turn (`messages`, or as the `prompt`), or a `prompt` and a `completion`. Only the
  tokens of the last assistant turn, up to the end-of-sequence token, contribute to the loss. The loss of a step is their mean.
- The warm-up steps are the first steps of the job, followed by the RLOO steps: 20 steps and `training.max_steps` 100 give 120 steps. Schedules,
  `eval.every_steps` and `optimizer.warmup_steps` count RLOO steps only. AdamW starts with fresh moments at the first RLOO step.
- If `eval.before_start` is true, the job is evaluated before and after the warm-up. The weights at its end are always checkpointed.
"), ("rloo", "
- Estimators `reinforce_pp` and `reinforce_pp_baseline` give every token its own advantage; with them, `loss` must be one of
  `token_mean`, `seq_mean_token_mean` and `dr_grpo`. `remax` also scores one greedy completion per prompt. `remax` and
  `reinforce` allow `num_generations` 1.
- `rloo_turns` needs an environment whose `return` is `sum`. It gives the tokens of a turn the rewards of that turn and of those after it,
  minus the mean of the other episodes from the same turn on, so `loss` must be one over tokens too, and rewards and advantages must be
  neither normalized nor clipped.
- `kl_in` `reward` requires `k1`; `kl_in` `loss` requires `k3` or `k2`.
- Rewards are first normalized (`reward_normalization`), then clipped (`reward_clip_range`); `length_penalty` and
  `soft_overlong` are applied after clipping.
- With `min_informative_groups`, tied groups are replaced by the next prompts, for at most `max_refills` rounds.
- `overlap` requires `steps_per_generation` of at least 2 and is incompatible with `min_informative_groups`. The next block is sampled and sent
  to the rewards while this one's rewards are outstanding, so every block except the first is off-policy by one block. Its old
  log-probabilities are those of the policy that sampled it, and the ratio corrects for the difference. When a block is sampled depends
  only on the steps: a slow reward changes nothing but the time, and a resumed run gives the same results.
")];

/// Returns the page as Markdown. A test compares it with the committed page.
pub fn settings_page() -> String {
    let mut page = HEAD.to_owned();
    for section in SECTIONS {
        let optional = if section.is_optional { " *optional*" } else { "" };
        page.push_str(&format!("\n## `{}`{optional}\n\n{}\n\n", section.name, section.doc));
        page.push_str("| setting | values | default | meaning | TRL | fork |\n|---|---|---|---|---|---|\n");
        let plan = section.plan_schema();
        for setting in section.settings {
            let cells = [
                names(setting),
                values(setting),
                default(section, setting),
                meaning(setting, &plan),
                trl(setting.trl),
                if setting.resume == Resume::Free { String::new() } else { "same".to_owned() },
            ];
            page.push_str(&format!(
                "| {} |\n",
                cells.map(|cell| cell.replace('|', "\\|").replace('\n', " ")).join(" | ")
            ));
        }
        for (_, notes) in NOTES.iter().filter(|(name, _)| *name == section.name) {
            page.push_str(notes);
        }
    }
    page
}

fn names(setting: &Setting) -> String {
    let also = setting.aliases.iter().map(|alias| format!(", also `{alias}`"));
    format!("`{}`{}", setting.name, also.collect::<String>())
}

fn values(setting: &Setting) -> String {
    match setting.kind {
        Kind::Flag => "true or false".to_owned(),
        Kind::Whole(low, high) => format!("{low} to {high}"),
        Kind::Number(range) => range.to_string(),
        Kind::Variant(names) => code_list(&names()),
        Kind::Text(max_chars) => format!("text, at most {max_chars} characters"),
        Kind::Own { says, .. } | Kind::Part { says, .. } => says.to_owned(),
    }
}

fn default(section: &Section, setting: &Setting) -> String {
    match setting.default {
        _ if setting.required.is_some() => "required".to_owned(),
        DefaultValue::Nothing => String::new(),
        DefaultValue::Follows(_, rule) => rule.to_owned(),
        _ if (section.name, setting.name) == ("optimizer", "learning_rate") => {
            format!(
                "{:e}; with `\"lora\": null` {:e}",
                crate::spec::LORA_LEARNING_RATE,
                crate::spec::FULL_LEARNING_RATE
            )
        }
        default => shown(default),
    }
}

fn shown(default: DefaultValue) -> String {
    match default.value(&Values::default()) {
        Value::Array(words) if words.is_empty() => "none".to_owned(),
        Value::Array(words) => code_list(&words.iter().filter_map(Value::as_str).collect::<Vec<_>>()),
        Value::String(word) => format!("`{word}`"),
        value => value.to_string(),
    }
}

fn meaning(setting: &Setting, plan: &Object) -> String {
    if !setting.doc.is_empty() {
        return setting.doc.to_owned();
    }
    match setting.schema(plan, &serde_json::Map::new()) {
        RefOr::Ref(reference) => reference.description,
        RefOr::T(Schema::Object(object)) => object.description.unwrap_or_default(),
        RefOr::T(Schema::Array(array)) => array.description.unwrap_or_default(),
        RefOr::T(Schema::OneOf(one)) => one.description.unwrap_or_default(),
        RefOr::T(_) => String::new(),
    }
}

fn trl(trl: Trl) -> String {
    let with_default = |keys: String, default: DefaultValue| match default {
        DefaultValue::Nothing => keys,
        default => format!("{keys}; {}", shown(default)),
    };
    match trl {
        Trl::Absent => String::new(),
        Trl::Always(value) => format!("always {}", shown(value)),
        Trl::Key(keys, _, default) => with_default(code_list(keys), default),
        Trl::Own(keys) => code_list(keys),
        Trl::Adapter(_, (flat, flat_default), (peft, peft_default)) => format!(
            "{}; of PEFT's LoraConfig {}",
            with_default(format!("`{flat}`"), flat_default),
            with_default(format!("`{peft}`"), peft_default)
        ),
    }
}

fn code_list<W: AsRef<str>>(words: &[W]) -> String {
    words.iter().map(|word| format!("`{}`", word.as_ref())).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn the_reference_page_says_what_the_tables_say() {
        let path = rlood_test_support::in_repository("docs/reference/job-settings.md");
        let page = settings_page();
        if std::env::var_os("RLOOD_BLESS").is_some() {
            std::fs::write(&path, &page).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            written == page,
            "{} is old: run `RLOOD_BLESS=1 cargo test --release -p rlood-types the_reference_page`",
            path.display()
        );
    }

    #[test]
    fn every_setting_has_a_description() {
        for section in SECTIONS {
            let plan = section.plan_schema();
            for setting in section.settings {
                assert!(!meaning(setting, &plan).is_empty(), "{}.{}", section.name, setting.name);
            }
        }
    }
}
