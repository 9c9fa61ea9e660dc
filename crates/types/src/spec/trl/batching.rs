//! TRL's batch arithmetic: which batch sizes it accepts, and the same batches counted in prompts.
//!
//! B = per_device_train_batch_size (completions), W = world size, GA = gradient_accumulation_steps, G = num_generations, S =
//! steps_per_generation in micro-steps. generation_batch_size = B·W·S must contain whole groups. An optimizer step here takes
//! B·W·GA/G prompts, and a block S/GA optimizer steps (`rloo.md`, Batching).

use super::reading::Keys;

/// Batch sizes of a TRL config converted to this API: sizes in prompts, accumulation in optimizer steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Batches {
    /// Prompts per optimizer step.
    pub prompts_per_step: u64,
    /// Optimizer steps per generation block.
    pub steps_per_generation: u64,
}

/// Reads and checks the batch settings. `None` if TRL would reject them or they cannot be expressed; the reason has been reported.
pub(super) fn read_batches(keys: &Keys<'_>, evaluates: bool) -> Option<Batches> {
    if keys.flag("auto_find_batch_size") == Some(true) {
        let detail = "rlood fits micro-batches to the available memory itself, and TRL rejects this key for RLOO too: remove this key";
        keys.fail("auto_find_batch_size", "invalid_value", detail);
    }
    let before = keys.findings.errors.borrow().len();
    let batch = keys.count("per_device_train_batch_size", 1).unwrap_or(8);
    let accumulation = keys.count("gradient_accumulation_steps", 1).unwrap_or(1);
    let world_key = if keys.has("world_size") { "world_size" } else { "num_processes" };
    let world = keys.count(world_key, 1).unwrap_or(1);
    let generations = read_generations(keys);
    let steps = keys.count("steps_per_generation", 1);
    let whole = keys.count("generation_batch_size", 1);
    if evaluates {
        check_eval(keys, generations.unwrap_or(2), world);
    }
    if keys.findings.errors.borrow().len() > before {
        return None;
    }
    // Each is at most 10^6, so no product overflows.
    let slice = batch * world;
    if let (Some(_), Some(_)) = (steps, whole) {
        let detail = "generation_batch_size and steps_per_generation set the same thing: give one of them";
        keys.fail("generation_batch_size", "conflict", detail);
        return None;
    }
    if let Some(whole) = whole.filter(|whole| whole % slice != 0) {
        let detail = format!(
            "the generation batch of {whole} completions is not a multiple of per_device_train_batch_size · devices ({slice}): the nearest valid values are {}",
            multiples_near(whole, slice)
        );
        keys.fail("generation_batch_size", "invalid_value", detail);
        return None;
    }
    let steps = whole.map_or(steps.unwrap_or(accumulation), |whole| whole / slice);
    let (whole, generations) = (slice * steps, generations.unwrap_or(2));
    if whole % generations != 0 {
        let unit = generations / gcd(generations, world * steps);
        let detail = format!(
            "the generation batch has {whole} completions (per_device_train_batch_size {batch} · devices {world} · steps_per_generation {steps}), which is no multiple of num_generations {generations}: the nearest valid values are num_generations {}, or per_device_train_batch_size {}",
            divisors_near(whole, generations),
            multiples_near(batch, unit)
        );
        keys.fail("num_generations", "invalid_value", detail);
        return None;
    }
    in_prompts(keys, Micro { slice, accumulation, steps, generations })
}

struct Micro {
    slice: u64,
    accumulation: u64,
    steps: u64,
    generations: u64,
}

/// Converts batches that TRL accepts. Some cannot be converted: here a group stays in one optimizer step, and a block
/// consists of whole optimizer steps.
fn in_prompts(keys: &Keys<'_>, micro: Micro) -> Option<Batches> {
    let Micro { slice, accumulation, steps, generations } = micro;
    let completions = slice * accumulation;
    let (whole_steps, whole_groups) = (steps % accumulation == 0, completions % generations == 0);
    if !whole_steps {
        let key = if keys.has("generation_batch_size") { "generation_batch_size" } else { "steps_per_generation" };
        let reason = format!(
            "TRL counts micro-steps here: {steps} of them are not a whole number of optimizer steps of gradient_accumulation_steps {accumulation} each; the nearest valid values are steps_per_generation {}",
            multiples_near(steps, accumulation)
        );
        keys.refuse(key, reason);
    }
    if !whole_groups {
        let reason = format!(
            "an optimizer step has {completions} completions, which are not whole groups of num_generations {generations}; a group stays in one step here: the nearest valid values are gradient_accumulation_steps {}",
            multiples_near(accumulation, generations / gcd(generations, slice))
        );
        keys.refuse("gradient_accumulation_steps", reason);
    }
    (whole_steps && whole_groups)
        .then(|| Batches { prompts_per_step: completions / generations, steps_per_generation: steps / accumulation })
}

fn read_generations(keys: &Keys<'_>) -> Option<u64> {
    let generations = keys.count("num_generations", 0)?;
    if generations < 2 {
        let detail = "num_generations must be at least 2: the baseline of a completion is the mean reward of the other completions of its prompt";
        keys.fail("num_generations", "out_of_range", detail);
        return None;
    }
    Some(generations)
}

fn check_eval(keys: &Keys<'_>, generations: u64, world: u64) {
    let Some(batch) = keys.count("per_device_eval_batch_size", 1).or(Some(8)) else { return };
    let generations_eval = keys.count("num_generations_eval", 1).unwrap_or(generations);
    let whole = batch * world;
    if !whole.is_multiple_of(generations_eval) {
        let detail = format!(
            "the evaluation batch has {whole} completions (per_device_eval_batch_size {batch} · devices {world}), which is no multiple of {generations_eval}: the nearest valid values are num_generations_eval {}, or per_device_eval_batch_size {}",
            divisors_near(whole, generations_eval),
            multiples_near(batch, generations_eval / gcd(generations_eval, world))
        );
        let key = if keys.has("num_generations_eval") { "num_generations_eval" } else { "per_device_eval_batch_size" };
        keys.fail(key, "invalid_value", detail);
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Returns the multiples of `unit` that are closest to `number`, at least one unit.
fn multiples_near(number: u64, unit: u64) -> String {
    let below = number / unit * unit;
    match below {
        0 => unit.to_string(),
        below if below == number => below.to_string(),
        below => format!("{below} and {}", below + unit),
    }
}

/// Returns the divisors of `whole` that are closest to `number`; a group has at least 2 completions.
fn divisors_near(whole: u64, number: u64) -> String {
    let least = if number == 1 { 1 } else { 2 };
    let below = (least..number.min(whole + 1)).rev().find(|divisor| whole.is_multiple_of(*divisor));
    // A job cannot have larger groups than this.
    let above = (number + 1..=whole.min(1024)).find(|divisor| whole.is_multiple_of(*divisor));
    match (below, above) {
        (Some(below), Some(above)) => format!("{below} and {above}"),
        (Some(one), None) | (None, Some(one)) => one.to_string(),
        (None, None) => "none (a larger batch is needed)".to_owned(),
    }
}
