//! Packs rows one after another without padding. Consecutive rows with the same prompt become one group: the prompt is
//! computed once, and every completion attends to it.

use super::Trajectory;
use super::rope::{Ropes, TokenTables};
use crate::error::{EngineError, Result};
use crate::ops::slices::{self, Group, Visible};

/// One batch of token ids, with the positions of all its tokens.
#[derive(Debug)]
pub struct Packing {
    /// Ids of all tokens, `[T]`.
    pub ids: Vec<u32>,
    /// Position of each token in its own sequence, `[T]`.
    pub positions: Vec<usize>,
    /// The groups (prompts with their completions), one after another.
    pub groups: Vec<Group>,
    /// The rotary angles of the tokens.
    pub token_tables: TokenTables,
    visible: Vec<(Option<usize>, Vec<Vec<Visible>>)>,
    /// The tokens whose log-probs are computed, row after row.
    pub targets: Vec<Target>,
}

/// A model token, and the packed token whose logits predict it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Index of the packed token whose logits predict this one.
    pub from: usize,
    /// Token id of the model token.
    pub id: u32,
}

impl Packing {
    /// Packs rows. The last model token of a row and the context after it predict nothing that is scored,
    /// so they are omitted.
    pub fn rows(rows: &[Trajectory<'_>], windows: &[Option<usize>], ropes: &Ropes) -> Result<Packing> {
        let (mut ids, mut groups, mut targets): (Vec<u32>, Vec<Group>, Vec<Target>) = Default::default();
        let mut lengths = Vec::new();
        // Rows share a prompt only if its tokens have the same rotary angles in all of them.
        let mut previous: Option<(&[u32], usize)> = None;
        let mut last_of_prompt = 0;
        for (index, row) in rows.iter().enumerate() {
            if row.prompt.is_empty() {
                return Err(EngineError::Input(format!(
                    "row {index} has an empty prompt; at least one token is required"
                )));
            }
            let Some(num_inputs) = row.segments.last_model_token() else { continue };
            let length = row.prompt.len() + row.segments.tokens().count();
            let shared = (row.prompt, ropes.regime(length));
            if previous != Some(shared) {
                previous = Some(shared);
                lengths.push(length);
                ids.extend(row.prompt);
                last_of_prompt = ids.len() - 1;
                groups.push(Group { prompt_len: row.prompt.len(), completion_lens: Vec::new() });
            }
            let mut from = last_of_prompt;
            for (place, (id, is_model)) in row.segments.tokens().take(num_inputs + 1).enumerate() {
                if is_model {
                    targets.push(Target { from, id });
                }
                if place < num_inputs {
                    from = ids.len();
                    ids.push(id);
                }
            }
            if let Some(group) = groups.last_mut() {
                group.completion_lens.push(num_inputs);
            }
        }
        Ok(Packing::new(ids, (groups, &lengths), targets, windows, ropes))
    }

    /// Packs whole sequences without scoring any token. Each sequence uses the rotary angles for the
    /// length given with it.
    pub fn sequences(sequences: &[(&[u32], usize)], windows: &[Option<usize>], ropes: &Ropes) -> Packing {
        let ids = sequences.iter().flat_map(|(ids, _)| ids.iter().copied()).collect();
        let group = |(ids, _): &(&[u32], usize)| Group { prompt_len: ids.len(), completion_lens: Vec::new() };
        let lengths: Vec<usize> = sequences.iter().map(|(_, length)| *length).collect();
        Packing::new(ids, (sequences.iter().map(group).collect(), &lengths), Vec::new(), windows, ropes)
    }

    fn new(
        ids: Vec<u32>,
        (groups, lengths): (Vec<Group>, &[usize]),
        targets: Vec<Target>,
        windows: &[Option<usize>],
        ropes: &Ropes,
    ) -> Packing {
        let positions: Vec<usize> = groups.iter().flat_map(positions).collect();
        let of_group = |(group, length): (&Group, &usize)| std::iter::repeat_n(*length, group.len());
        let by_token: Vec<usize> = match ropes.depend_on_length() {
            true => groups.iter().zip(lengths).flat_map(of_group).collect(),
            false => Vec::new(),
        };
        let token_tables = ropes.token_tables(&positions, |token| by_token.get(token).copied().unwrap_or_default());
        let mut visible: Vec<(Option<usize>, Vec<Vec<Visible>>)> = Vec::new();
        for window in windows {
            if visible.iter().all(|(known, _)| known != window) {
                visible.push((*window, groups.iter().map(|g| slices::visible(g, *window)).collect()));
            }
        }
        Packing { ids, positions, groups, token_tables, visible, targets }
    }

    /// The positions that each token attends to in a layer with this attention window, group by group.
    pub fn visible(&self, window: Option<usize>) -> &[Vec<Visible>] {
        self.visible.iter().find(|(known, _)| *known == window).map_or(&[], |(_, visible)| visible)
    }
}

/// Each token's position in its own sequence.
fn positions(group: &Group) -> impl Iterator<Item = usize> + '_ {
    let Group { prompt_len, completion_lens } = group;
    (0..*prompt_len).chain(completion_lens.iter().flat_map(move |len| *prompt_len..prompt_len + len))
}
