//! Reads the format and the size of an image from its header, without decoding it.

use rlood_types::dataset::ImageFormat;

/// Returns the format, the width and the height in pixels.
///
/// # Errors
/// Names another format, or says that the header is damaged.
pub(super) fn read(bytes: &[u8]) -> Result<(ImageFormat, u32, u32), String> {
    let Some(format) = ImageFormat::of(bytes) else {
        let found =
            other_format(bytes).map_or("this is no image".to_owned(), |name| format!("{name} is not supported"));
        return Err(format!("{found}: use PNG, JPEG, WebP or GIF"));
    };
    let size = match format {
        ImageFormat::Png => png(bytes),
        ImageFormat::Jpeg => jpeg(bytes),
        ImageFormat::Webp => webp(bytes),
        ImageFormat::Gif => Some((le16(bytes, 6), le16(bytes, 8))).and_then(both),
    };
    match size {
        Some((width, height)) if width > 0 && height > 0 => Ok((format, width, height)),
        _ => Err(format!("the header of the {} file is damaged", format.media_type())),
    }
}

/// Returns the name of a format that is known, but not supported.
fn other_format(bytes: &[u8]) -> Option<&'static str> {
    let after = |at: usize| bytes.get(at..).unwrap_or_default();
    match bytes {
        [b'B', b'M', ..] => Some("BMP"),
        [b'I', b'I', 42, 0, ..] | [b'M', b'M', 0, 42, ..] => Some("TIFF"),
        [b'%', b'P', b'D', b'F', ..] => Some("PDF"),
        [b'<', ..] => Some("SVG"),
        [0, 0, 1, 0, ..] => Some("ICO"),
        [0x00, 0x00, 0x00, 0x0c, b'j', b'P', ..] | [0xff, 0x4f, 0xff, 0x51, ..] => Some("JPEG 2000"),
        _ if after(4).starts_with(b"ftypavif") => Some("AVIF"),
        _ if after(4).starts_with(b"ftyphei") || after(4).starts_with(b"ftypmif1") => Some("HEIC"),
        _ => None,
    }
}

fn both((width, height): (Option<u32>, Option<u32>)) -> Option<(u32, u32)> {
    Some((width?, height?))
}

fn be16(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?)))
}

fn le16(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?)))
}

fn le24(bytes: &[u8], at: usize) -> Option<u32> {
    Some(le16(bytes, at)? | u32::from(*bytes.get(at + 2)?) << 16)
}

/// Reads the chunk IHDR, which comes first (PNG specification, 11.2.1).
fn png(bytes: &[u8]) -> Option<(u32, u32)> {
    let be32 = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    (bytes.get(12..16)? == b"IHDR").then_some((be32(16), be32(20))).and_then(both)
}

/// Walks the segments up to the frame header (ITU-T T.81, B.2.2).
fn jpeg(bytes: &[u8]) -> Option<(u32, u32)> {
    let mut at = 2;
    loop {
        if *bytes.get(at)? != 0xff {
            return None;
        }
        let marker = *bytes.get(at + 1)?;
        match marker {
            // Fill bytes before a marker.
            0xff => at += 1,
            // Markers without a length.
            0x01 | 0xd0..=0xd8 => at += 2,
            // SOF0 to SOF15, without the tables DHT, JPG and DAC among them.
            0xc0..=0xcf if ![0xc4, 0xc8, 0xcc].contains(&marker) => {
                return both((be16(bytes, at + 7), be16(bytes, at + 5)));
            }
            // The scan or the end came before a frame header.
            0xd9 | 0xda => return None,
            _ => {
                let length = be16(bytes, at + 2)?;
                at += 2 + usize::try_from(length).ok().filter(|length| *length >= 2)?;
            }
        }
    }
}

/// Reads the first chunk (RFC 9649, 2.5 to 2.7).
fn webp(bytes: &[u8]) -> Option<(u32, u32)> {
    match bytes.get(12..16)? {
        b"VP8 " if bytes.get(23..26)? == [0x9d, 0x01, 0x2a] => {
            Some((le16(bytes, 26)? & 0x3fff, le16(bytes, 28)? & 0x3fff))
        }
        b"VP8L" if *bytes.get(20)? == 0x2f => {
            let bits = u32::from_le_bytes(bytes.get(21..25)?.try_into().ok()?);
            Some(((bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1))
        }
        b"VP8X" => Some((le24(bytes, 24)? + 1, le24(bytes, 27)? + 1)),
        _ => None,
    }
}
