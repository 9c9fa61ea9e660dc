//! Parses and formats sizes in bytes, such as `512M` or `12.3 GB`.

/// Units of a size, in bytes. Two-letter units are decimal, as for disks; the others are powers of 1024.
const UNITS: [(&str, u64); 14] = [
    ("", 1),
    ("B", 1),
    ("K", 1 << 10),
    ("KIB", 1 << 10),
    ("KB", 1_000),
    ("M", 1 << 20),
    ("MIB", 1 << 20),
    ("MB", 1_000_000),
    ("G", 1 << 30),
    ("GIB", 1 << 30),
    ("GB", 1_000_000_000),
    ("T", 1 << 40),
    ("TIB", 1 << 40),
    ("TB", 1_000_000_000_000),
];

/// Parses a number of bytes, or a number with a unit: `512M`, `12G` (powers of 1024), `200GB` (powers of 1000).
///
/// # Errors
/// Returns a message with the expected format.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let refused = || {
        format!("'{text}' is not a size: must be a number of bytes, or a number with a unit such as 512M, 12G or 200GB")
    };
    let trimmed = text.trim();
    let digits = trimmed.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = trimmed.get(digits.len()..).unwrap_or_default().trim().to_ascii_uppercase();
    let (_, bytes) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(refused)?;
    let number: u64 = digits.parse().map_err(|_| refused())?;
    number.checked_mul(*bytes).ok_or_else(refused)
}

/// Formats a size in decimal units: `12.3 GB`.
pub fn format_size(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes as f64, "bytes");
    for larger in ["kB", "MB", "GB", "TB"] {
        // A value from 999.5 would be rounded to 1000, so it gets the next unit.
        if value < 999.5 {
            break;
        }
        (value, unit) = (value / 1000.0, larger);
    }
    match unit {
        "bytes" => format!("{bytes} bytes"),
        _ if value < 99.95 => format!("{value:.1} {unit}"),
        _ => format!("{value:.0} {unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_binary_and_decimal_units() {
        for (text, bytes) in
            [("17", 17), (" 2 k ", 2048), ("512M", 512 << 20), ("12GiB", 12 << 30), ("200GB", 200_000_000_000)]
        {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for bad in ["", "G", "1.5G", "-1", "12 apples", "99999999999T"] {
            assert!(parse_size(bad).unwrap_err().contains("number of bytes"), "{bad}");
        }
    }

    #[test]
    fn sizes_are_written_with_three_digits_at_most() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (999, "999 bytes"),
            (1234, "1.2 kB"),
            (99_960, "100 kB"),
            (999_600, "1.0 MB"),
            (12_345_678_901, "12.3 GB"),
        ] {
            assert_eq!(format_size(bytes), text);
        }
    }
}
