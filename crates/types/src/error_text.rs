//! Formats an error with its causes as a single text for logs. (A JSON log shows only the outermost message of an error that is
//! passed as a value.)

use std::error::Error;

/// Returns the error and its causes as one text each, without repetitions.
pub fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Sample {
        #[error("cannot save")]
        Quiet(#[source] std::io::Error),
        #[error("cannot save: {0}")]
        Told(#[source] std::io::Error),
    }

    #[test]
    fn every_cause_is_shown_once() {
        let cause = || std::io::Error::other("the disk is gone");
        assert_eq!(with_causes(&Sample::Quiet(cause())), "cannot save: the disk is gone");
        assert_eq!(with_causes(&Sample::Told(cause())), "cannot save: the disk is gone");
    }
}
