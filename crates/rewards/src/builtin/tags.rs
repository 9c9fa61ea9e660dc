//! A reward for completions that are laid out in tags, for example `<think>…</think><answer>…</answer>`.

use crate::spec::FormatPlan;

/// Returns 1 if every tag of the plan opens and closes once and in order, and, with `strict`, no text is outside the tags; else 0.
/// With `partial`, returns the share of these requirements that are met.
pub(super) fn format(completion: &str, plan: &FormatPlan) -> f64 {
    let (mut met, mut end, mut is_clean) = (0usize, 0, true);
    for (index, tag) in plan.tags.iter().enumerate() {
        let may_be_open = index == 0 && plan.first_tag_open;
        let Some((start, inside_end, next)) = find(completion, tag, may_be_open) else { continue };
        if start < end || inside_end < start {
            continue;
        }
        is_clean &= completion[end..start].trim().is_empty();
        end = next;
        met += 1;
    }
    is_clean &= completion[end..].trim().is_empty();
    let demands = plan.tags.len() + usize::from(plan.strict);
    let met = met + usize::from(plan.strict && is_clean);
    if plan.partial { met as f64 / demands.max(1) as f64 } else { f64::from(u8::from(met == demands)) }
}

/// Returns the positions where a tag that occurs exactly once opens, where it closes, and where its closing tag ends.
fn find(text: &str, tag: &str, may_be_open: bool) -> Option<(usize, usize, usize)> {
    let (opening, closing) = (format!("<{tag}>"), format!("</{tag}>"));
    let once = |mark: &str| {
        let at = text.find(mark)?;
        (text.rfind(mark) == Some(at)).then_some(at)
    };
    let close = once(&closing)?;
    let open = match text.contains(&opening) {
        true => once(&opening)?,
        false if may_be_open => 0,
        false => return None,
    };
    (open <= close).then_some((open, close, close + closing.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(strict: bool, partial: bool, first_tag_open: bool) -> FormatPlan {
        FormatPlan { tags: vec!["think".into(), "answer".into()], strict, partial, first_tag_open }
    }

    const GOOD: &str = "<think>\nwell\n</think>\n<answer>4</answer>\n";

    #[test]
    fn the_layout_is_all_or_nothing() {
        for (completion, strict, loose) in [
            (GOOD, 1.0, 1.0),
            ("<think></think><answer></answer>", 1.0, 1.0),
            ("Hm. <think>a</think> so <answer>4</answer> done", 0.0, 1.0),
            ("<answer>4</answer><think>a</think>", 0.0, 0.0),
            ("<think>a</think>", 0.0, 0.0),
            ("<think>a<answer>4</answer></think>", 0.0, 0.0),
            ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0, 0.0),
            ("<think>a</think></think><answer>4</answer>", 0.0, 0.0),
            ("</think><think><answer>4</answer>", 0.0, 0.0),
            ("a</think><answer>4</answer>", 0.0, 0.0),
            ("", 0.0, 0.0),
        ] {
            assert_eq!(format(completion, &plan(true, false, false)), strict, "{completion}");
            assert_eq!(format(completion, &plan(false, false, false)), loose, "{completion}");
        }
    }

    #[test]
    fn the_first_tag_may_have_been_opened_by_the_prompt() {
        let open = plan(true, false, true);
        assert_eq!(format("a</think><answer>4</answer>", &open), 1.0);
        assert_eq!(format(GOOD, &open), 1.0);
        assert_eq!(format("a<answer>4</answer>", &open), 0.0);
        assert_eq!(format("a</think>4</answer>", &open), 0.0);
    }

    #[test]
    fn partial_marks_are_the_share_of_what_is_met() {
        let third = |met: f64| met / 3.0;
        for (completion, expected) in [
            (GOOD, 1.0),
            ("<think>a</think> <answer>4", third(1.0)),
            ("so <think>a</think><answer>4</answer>", third(2.0)),
            ("<think>a</think>", third(2.0)),
            ("nothing", 0.0),
        ] {
            assert_eq!(format(completion, &plan(true, true, false)), expected, "{completion}");
        }
        assert_eq!(format("<answer>4</answer>", &plan(false, true, false)), 0.5);
    }
}
