//! Output of data on standard output and of messages on standard error, with tables and formatting of numbers and times.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use clap::ValueEnum;
use console::{measure_text_width, truncate_str};
use jiff::Timestamp;
use serde_json::Value;

use crate::error::CliError;

/// Block characters of a sparkline, from lowest to highest.
const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Placeholder that is printed for a missing value.
pub const NONE: &str = "–";

/// When output is colored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// Use color on a terminal, unless NO_COLOR is set.
    Auto,
    /// Use color even without a terminal.
    Always,
    /// Use no color, even on a terminal.
    Never,
}

/// Output settings of a command.
#[derive(Debug, Clone, Copy)]
pub struct Out {
    /// Print the API's JSON instead of formatted text.
    pub json: bool,
    /// Whether standard output is a terminal.
    pub is_terminal: bool,
    /// Whether the user can be asked a question: standard input and standard error are a terminal.
    pub can_ask: bool,
    /// Number of columns of the terminal, to which lines are truncated; `None` means that lines are not truncated.
    width: Option<usize>,
}

impl Out {
    /// Creates the output settings from the flags, the environment and the type of the standard streams.
    pub fn new(json: bool, color: Color) -> Self {
        let (stdout, stderr) = (std::io::stdout().is_terminal(), std::io::stderr().is_terminal());
        let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let colored = |is_terminal: bool| match color {
            Color::Auto => is_terminal && !unwanted && !json,
            Color::Always => true,
            Color::Never => false,
        };
        console::set_colors_enabled(colored(stdout));
        console::set_colors_enabled_stderr(colored(stderr));
        let width = stdout.then(|| usize::from(console::Term::stdout().size().1));
        Self { json, is_terminal: stdout, can_ask: stderr && std::io::stdin().is_terminal(), width }
    }

    /// Prints a line of data to standard output.
    ///
    /// # Errors
    /// Returns [`CliError::Closed`] when the program that reads standard output has exited, else the write error.
    pub fn line(&self, text: impl AsRef<str>) -> Result<(), CliError> {
        self.text(&format!("{}\n", text.as_ref()))
    }

    /// Prints text to standard output without adding a line feed.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Out::line`].
    pub fn text(&self, text: &str) -> Result<(), CliError> {
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(|error| match error.kind() {
            std::io::ErrorKind::BrokenPipe => CliError::Closed,
            _ => CliError::local("write to standard output")(error),
        })
    }

    /// Prints the server's JSON to standard output, with exactly one line feed at the end.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Out::line`].
    pub fn json(&self, text: &str) -> Result<(), CliError> {
        self.line(text.trim_end_matches('\n'))
    }

    /// Prints a message to standard error.
    pub fn note(&self, text: impl AsRef<str>) {
        note(text);
    }

    /// Asks the user on the terminal for confirmation.
    ///
    /// # Errors
    /// Fails when there is no terminal, or the answer is not yes.
    pub fn confirm(&self, question: &str, flag: &str) -> Result<(), CliError> {
        if !self.can_ask {
            return Err(CliError::Usage(format!(
                "{question} Confirm with {flag}, because there is no terminal to ask on"
            )));
        }
        let _ = write!(std::io::stderr(), "{question} [y/N] ");
        let mut answer = String::new();
        std::io::stdin().read_line(&mut answer).map_err(CliError::local("read the answer to the question"))?;
        match answer.trim().to_ascii_lowercase().as_str() {
            "y" | "yes" => Ok(()),
            _ => Err(CliError::Usage("the command was not confirmed; nothing was changed".to_owned())),
        }
    }

    /// Truncates a text to the width of the terminal.
    pub fn fit(&self, text: &str) -> String {
        match self.width {
            Some(width) => truncate_str(text, width, "…").into_owned(),
            None => text.to_owned(),
        }
    }
}

/// Prints a message to standard error.
pub fn note(text: impl AsRef<str>) {
    // Errors are ignored, because a closed standard error must not stop the command.
    let _ = writeln!(std::io::stderr(), "{}", text.as_ref());
}

/// A table for standard output whose columns are as wide as their widest cell.
#[derive(Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates an empty table with the given column headings.
    pub fn new(headings: &[&str]) -> Self {
        Self { rows: vec![headings.iter().map(|heading| (*heading).to_owned()).collect()] }
    }

    /// Adds a row of cells to the table.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Prints the table to standard output.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Out::line`].
    pub fn print(&self, out: &Out) -> Result<(), CliError> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|cell| measure_text_width(cell)).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for (index, row) in self.rows.iter().enumerate() {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                line.push_str(cell);
                if column + 1 < row.len() {
                    line.extend(std::iter::repeat_n(' ', widths[column] - measure_text_width(cell) + 2));
                }
            }
            let line = out.fit(line.trim_end());
            out.line(if index == 0 { console::style(line).bold().to_string() } else { line })?;
        }
        Ok(())
    }
}

/// Makes untrusted text safe for a terminal: replaces control characters, and puts the text on one line.
pub fn clean(text: &str) -> String {
    text.chars()
        .map(|letter| match letter {
            '\n' => '⏎',
            '\t' => ' ',
            other if other.is_control() => '\u{fffd}',
            other => other,
        })
        .collect()
}

/// Makes untrusted text of several lines safe for a terminal: keeps line feeds and tabs, replaces other control characters.
pub fn clean_lines(text: &str) -> String {
    text.chars()
        .map(|letter| if letter.is_control() && letter != '\n' && letter != '\t' { '\u{fffd}' } else { letter })
        .collect()
}

/// Formats a JSON value as text; [`NONE`] for null or a missing field.
pub fn shown(value: &Value) -> String {
    match value {
        Value::Null => NONE.to_owned(),
        Value::String(text) => clean(text),
        Value::Number(number) => match number.as_f64() {
            Some(float) if number.is_f64() => format_number(float),
            _ => number.to_string(),
        },
        other => clean(&other.to_string()),
    }
}

/// Formats a number with up to four decimal places, or in scientific notation below 0.001.
pub fn format_number(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        "0".to_owned()
    } else if size >= 1000.0 {
        format!("{value:.0}")
    } else if size >= 0.001 {
        format!("{value:.4}").trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        format!("{value:.2e}")
    }
}

/// Formats an optional number; [`NONE`] if there is none.
pub fn format_optional(value: Option<f64>) -> String {
    value.map_or_else(|| NONE.to_owned(), format_number)
}

/// Formats a size in bytes with a binary unit: `1.5 KiB`.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Formats a number of seconds: `45s`, `3m20s`, `2h05m`, `4d03h`.
pub fn format_duration(seconds: f64) -> String {
    let seconds = seconds.max(0.0).round() as u64;
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

/// Formats the age of an RFC 3339 timestamp: `3m20s ago`.
pub fn format_age(time: &Value) -> String {
    let time = time.as_str().and_then(|text| text.parse::<Timestamp>().ok());
    time.map_or_else(
        || NONE.to_owned(),
        |time| format!("{} ago", format_duration(Timestamp::now().duration_since(time).as_secs_f64())),
    )
}

/// Returns the seconds between two RFC 3339 timestamps.
pub fn between(from: &Value, to: &Value) -> Option<f64> {
    let time = |value: &Value| value.as_str()?.parse::<Timestamp>().ok();
    Some(time(to)?.duration_since(time(from)?).as_secs_f64())
}

/// Returns a sparkline of values: block characters, averaged down to at most `width` characters.
pub fn sparkline(values: &[f64], width: usize) -> String {
    let values: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    let count = values.len().min(width);
    if count == 0 {
        return String::new();
    }
    let mean = |index: usize| {
        let (begin, end) = (index * values.len() / count, (index + 1) * values.len() / count);
        values[begin..end].iter().sum::<f64>() / (end - begin) as f64
    };
    let means: Vec<f64> = (0..count).map(mean).collect();
    let (low, high) = means.iter().fold((f64::MAX, f64::MIN), |(low, high), mean| (low.min(*mean), high.max(*mean)));
    let block = |mean: &f64| {
        let height = if high > low { (mean - low) / (high - low) * 7.0 } else { 3.0 };
        BLOCKS[(height.round() as usize).min(7)]
    };
    means.iter().map(block).collect()
}

/// Parses the duration that a flag gives: `90`, `30s`, `10m`, `2h`, `1d`. A number without a unit is in seconds.
///
/// # Errors
/// Returns a message with the expected format.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let refused = || format!("'{text}' is not a duration; must be like 30s, 10m, 2h or 1d");
    let (number, unit) = match text.char_indices().last() {
        Some((at, 's')) => (&text[..at], 1.0),
        Some((at, 'm')) => (&text[..at], 60.0),
        Some((at, 'h')) => (&text[..at], 3600.0),
        Some((at, 'd')) => (&text[..at], 86_400.0),
        _ => (text, 1.0),
    };
    let number: f64 = number.parse().map_err(|_| refused())?;
    Duration::try_from_secs_f64(number * unit).map_err(|_| refused()).and_then(|span| {
        // The maximum is 100 years, because longer durations overflow when they are added to the current time.
        if span <= Duration::from_secs(100 * 366 * 86_400) { Ok(span) } else { Err(refused()) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_times_and_sizes_are_short() {
        for (value, text) in
            [(0.0, "0"), (0.5, "0.5"), (-0.12345, "-0.1235"), (12.0, "12"), (1234.5, "1234"), (0.00012, "1.20e-4")]
        {
            assert_eq!(format_number(value), text);
        }
        for (seconds, text) in [(0.4, "0s"), (59.6, "1m00s"), (200.0, "3m20s"), (7500.0, "2h05m"), (356_400.0, "4d03h")]
        {
            assert_eq!(format_duration(seconds), text);
        }
        assert_eq!(
            (format_bytes(12), format_bytes(1536), format_bytes(5 << 30)),
            ("12 B".to_owned(), "1.5 KiB".to_owned(), "5.0 GiB".to_owned())
        );
        assert_eq!(parse_duration("1.5h"), Ok(Duration::from_secs(5400)));
        for bad in ["", "h", "-1s", "1w", "nan", "1e30d", "5ü"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_sparkline_shows_the_course_in_its_width() {
        assert_eq!(sparkline(&[0.0, 1.0], 10), "▁█");
        assert_eq!(sparkline(&[5.0, 5.0], 10), "▄▄");
        assert_eq!(sparkline(&(0..1000).map(f64::from).collect::<Vec<_>>(), 8), "▁▂▃▄▅▆▇█");
        assert_eq!(sparkline(&[f64::NAN], 8), "");
    }

    #[test]
    fn untrusted_text_cannot_control_the_terminal() {
        assert_eq!(clean("a\u{1b}[2Jb\nc\td"), "a\u{fffd}[2Jb⏎c d");
        assert_eq!(clean_lines("a\u{1b}\n\u{9b}b\r"), "a\u{fffd}\n\u{fffd}b\u{fffd}");
    }
}
