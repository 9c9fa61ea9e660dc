//! The alert about attempts that ended before their job was over. The server raises it; it does not depend on metrics.

use crate::event::{Alert, AttemptEnd, Observation, OnAlert, Phase, Rule};

/// Number of further ended attempts after which the alert is raised again.
pub const ENDS_AN_ALERT: u64 = 10;

/// Returns the alert about these ends, oldest first; `total` counts all ended attempts of the job. The alert only informs: an
/// interruption that is not the job's fault never pauses or ends the job.
pub fn many_restarts(ends: Vec<AttemptEnd>, total: u64) -> Option<Alert> {
    let (first, last) = (ends.first()?, ends.last()?);
    let (from_step, to_step) = (ends.iter().map(|end| end.step).min()?, ends.iter().map(|end| end.step).max()?);
    let list: Vec<String> = ends.iter().map(AttemptEnd::describe).collect();
    let message = format!(
        "{total} attempts have ended before the job was over; attempts {} to {}: {}",
        first.attempt,
        last.attempt,
        list.join("; ")
    );
    let mut evidence = vec![Observation {
        metric: "attempt_ends".to_owned(),
        statistic: "count".to_owned(),
        value: total as f64,
        limit: Some(ENDS_AN_ALERT as f64),
        from_step,
        to_step,
    }];
    evidence.extend(ends.iter().filter_map(|end| {
        let phase = end.phase.map_or("an unknown phase", Phase::as_str);
        Some(Observation {
            metric: "memory/resident_bytes".to_owned(),
            statistic: format!("attempt {}, {} in {phase}", end.attempt, end.reason),
            value: end.memory_bytes? as f64,
            limit: None,
            from_step: end.step,
            to_step: end.step,
        })
    }));
    Some(Alert {
        rule: Rule::ManyRestarts,
        severity: Rule::ManyRestarts.severity(),
        step: last.step,
        since_step: from_step,
        message,
        evidence,
        fix: "read the job's log: if memory grows before each end, lower sampling.max_completion_length, \
              rloo.num_generations or training.prompts_per_step; if machines are taken away, set \
              checkpoints.every_seconds so that less work is repeated"
            .to_owned(),
        on_alert: OnAlert::Note,
        ends,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alert_lists_phase_and_memory_of_each_end() {
        let end = |attempt: u64| AttemptEnd {
            attempt,
            time_ms: 5,
            reason: "worker_lost".to_owned(),
            phase: Some(Phase::Rollout),
            step: attempt,
            memory_bytes: (attempt != 2).then_some(attempt << 30),
            detail: Some("signal: 9 (SIGKILL)".to_owned()),
        };
        let alert = many_restarts(vec![end(1), end(2), end(3)], 10).unwrap();
        assert!(
            alert.message.contains("attempt 3: worker_lost (signal: 9 (SIGKILL)) in rollout at step 3, 3072 MiB"),
            "{}",
            alert.message
        );
        assert!(alert.message.contains("at step 2, memory unknown"), "{}", alert.message);
        assert_eq!((alert.step, alert.since_step, alert.ends.len()), (3, 1, 3));
        // An attempt whose memory use is unknown is left out of the evidence, which has only numbers.
        assert_eq!(
            alert.evidence.iter().map(|seen| seen.value).collect::<Vec<_>>(),
            [10.0, 1073741824.0, 3221225472.0]
        );
        assert_eq!(many_restarts(Vec::new(), 10), None);
    }
}
