//! Attention of one layer at the sizes of a step.

use serde::{Deserialize, Serialize};

use super::super::timing::repeat;
use super::super::{BenchError, Setting};
use super::{Team, random_values};
use crate::engine::kernels::attention::{
    Backward, Batch, Forward, Group, Heads, Query, Segment, Segments, Visible, attend_batches, attend_groups,
    attend_groups_backward,
};

/// Durations of one layer's attention, in seconds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AttentionFigures {
    /// Forward pass over all sequences of a step, packed together.
    pub forward_s: f64,
    /// Backward pass over all sequences of a step, packed together.
    pub backward_s: f64,
    /// One decode step of all completions when they have half their length.
    pub decode_s: f64,
}

/// Measures attention with the step's own prompts and completions.
pub(super) fn measure(setting: &Setting<'_>, team: &Team) -> Result<AttentionFigures, BenchError> {
    let (forward_s, backward_s) = packed(setting, team)?;
    Ok(AttentionFigures { forward_s, backward_s, decode_s: decode(setting, team)? })
}

fn heads(setting: &Setting<'_>) -> Heads {
    let config = &setting.card.config;
    Heads::new(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
}

fn packed(setting: &Setting<'_>, team: &Team) -> Result<(f64, f64), BenchError> {
    let (args, heads) = (setting.args, heads(setting));
    let group = Group {
        prompt_len: args.prompt_len as usize,
        completion_lens: vec![args.completion as usize; args.generations as usize],
    };
    let groups = vec![group; args.prompts as usize];
    let tokens: usize = groups.iter().map(Group::len).sum();
    let qkv = random_values(1, tokens * heads.width(), 2.0);
    let d_out = random_values(2, tokens * heads.q_width(), 2.0);
    let mut out = vec![0.0; tokens * heads.q_width()];
    let mut softmax = vec![0.0; tokens * heads.num_heads * 2];
    let mut d_qkv = vec![0.0; qkv.len()];
    let mut segments = Segments::default();
    let isa = team.isa.vectors();
    let forward = Forward { heads: &heads, groups: &groups, window: None, qkv: &qkv };
    let attended = repeat(2, team.seconds, || -> Result<(), BenchError> {
        attend_groups(&team.threads, isa, &forward, &mut segments, &mut out, Some(&mut softmax));
        Ok(())
    })?;
    let backward = Backward {
        heads: &heads,
        groups: &groups,
        window: None,
        qkv: &qkv,
        out: &out,
        softmax: &softmax,
        d_out: &d_out,
    };
    let back = repeat(2, team.seconds, || -> Result<(), BenchError> {
        attend_groups_backward(&team.threads, isa, &backward, &mut d_qkv);
        Ok(())
    })?;
    Ok((attended.min_s, back.min_s))
}

fn decode(setting: &Setting<'_>, team: &Team) -> Result<f64, BenchError> {
    let (args, heads) = (setting.args, heads(setting));
    let (prompts, generations) = (args.prompts as usize, args.generations as usize);
    let (prompt_len, grown) = (args.prompt_len as usize, (args.completion as usize / 2).max(1));
    let segment = |seed: usize, len: usize| {
        let mut segment = Segment::default();
        segment.extend(&heads, &random_values(seed, len * heads.width(), 2.0));
        segment
    };
    let shared: Vec<Segment> = (0..prompts).map(|prompt| segment(prompt, prompt_len)).collect();
    let own: Vec<Segment> = (0..prompts * generations).map(|row| segment(prompts + row, grown)).collect();
    let qkv = random_values(3, own.len() * heads.width(), 2.0);
    let mut out = vec![0.0; own.len() * heads.q_width()];
    let attended = repeat(2, team.seconds, || -> Result<(), BenchError> {
        let rows = own.iter().zip(qkv.chunks(heads.width())).zip(out.chunks_mut(heads.q_width()));
        let mut queries: Vec<Query<'_>> = rows
            .map(|((own, qkv), out)| Query { qkv, own, visible: Visible { prompt: 0..prompt_len, own: 0..grown }, out })
            .collect();
        let mut batches: Vec<Batch<'_, '_>> =
            queries.chunks_mut(generations).zip(&shared).map(|(queries, prompt)| Batch { prompt, queries }).collect();
        attend_batches(&team.threads, team.isa.vectors(), &heads, &mut batches);
        Ok(())
    })?;
    Ok(attended.min_s)
}
