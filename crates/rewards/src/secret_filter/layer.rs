//! Removes one layer of escapes, as used by JSON, URLs, forms and HTML, and maps positions back to the escaped text.

use std::ops::Range;

/// A text without its outermost escapes, with a map of positions to the escaped text.
pub(super) struct Layer {
    pub(super) text: Vec<u8>,
    pieces: Vec<Piece>,
    /// Length in bytes of the escaped text.
    length: usize,
}

/// Position where a piece starts, in the unescaped text (`here`) and in the escaped text (`above`).
struct Piece {
    here: usize,
    above: usize,
    is_escape: bool,
}

impl Layer {
    /// Removes the outermost escapes of a text; `None` if it has none.
    pub(super) fn unescape(above: &[u8]) -> Option<Self> {
        let (mut text, mut pieces) = (Vec::with_capacity(above.len()), Vec::new());
        let (mut at, mut copied) = (0, 0);
        while let Some(skipped) = above[at..].iter().position(|byte| b"\\%&+".contains(byte)) {
            at += skipped;
            let mut meant = Vec::new();
            let Some(length) = read_escape(&above[at..], &mut meant) else {
                at += 1;
                continue;
            };
            pieces.push(Piece { here: text.len(), above: copied, is_escape: false });
            text.extend_from_slice(&above[copied..at]);
            pieces.push(Piece { here: text.len(), above: at, is_escape: true });
            text.append(&mut meant);
            at += length;
            copied = at;
        }
        if pieces.is_empty() {
            return None;
        }
        pieces.push(Piece { here: text.len(), above: copied, is_escape: false });
        text.extend_from_slice(&above[copied..]);
        Some(Self { text, pieces, length: above.len() })
    }

    /// Maps a non-empty range of this text to the escaped text. A range that touches an escape includes all of it.
    pub(super) fn origin(&self, place: &Range<usize>) -> Range<usize> {
        self.origin_of_byte(place.start).start..self.origin_of_byte(place.end.saturating_sub(1)).end
    }

    fn origin_of_byte(&self, at: usize) -> Range<usize> {
        let next = self.pieces.partition_point(|piece| piece.here <= at);
        let end = self.pieces.get(next).map_or(self.length, |piece| piece.above);
        match self.pieces[..next].last() {
            Some(piece) if piece.is_escape => piece.above..end,
            Some(piece) => piece.above + (at - piece.here)..piece.above + (at - piece.here) + 1,
            None => at..at + 1,
        }
    }
}

/// Appends the character that the escape at the start of a text stands for, and returns the length of the escape; `None` if the
/// text does not start with an escape.
fn read_escape(text: &[u8], out: &mut Vec<u8>) -> Option<usize> {
    let mut push = |meant: u32| char::from_u32(meant).map(|meant| out.extend(meant.to_string().into_bytes()));
    match text {
        // The character `+` stands for a space in form encoding.
        [b'+', ..] => push(0x20).map(|()| 1),
        [b'%', rest @ ..] | [b'\\', b'x', rest @ ..] => {
            out.push(u8::try_from(number(rest.get(..2)?, 16)?).ok()?);
            Some(text.len() - rest.len() + 2)
        }
        [b'\\', b'u', rest @ ..] => {
            let unit = number(rest.get(..4)?, 16)?;
            let second = rest[4..].strip_prefix(b"\\u").and_then(|rest| number(rest.get(..4)?, 16));
            match second {
                Some(low @ 0xdc00..=0xdfff) if (0xd800..0xdc00).contains(&unit) => {
                    push(0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00)).map(|()| 12)
                }
                _ => push(unit).map(|()| 6),
            }
        }
        [b'\\', b'n', ..] => push(0x0a).map(|()| 2),
        [b'\\', b'r', ..] => push(0x0d).map(|()| 2),
        [b'\\', b't', ..] => push(0x09).map(|()| 2),
        [b'\\', other, ..] if other.is_ascii_punctuation() => push(u32::from(*other)).map(|()| 2),
        [b'&', rest @ ..] => {
            let length = rest.iter().take(8).position(|byte| *byte == b';')?;
            let meant = match &rest[..length] {
                b"amp" => 0x26,
                b"lt" => 0x3c,
                b"gt" => 0x3e,
                b"quot" => 0x22,
                b"apos" => 0x27,
                [b'#', b'x' | b'X', digits @ ..] => number(digits, 16)?,
                [b'#', digits @ ..] => number(digits, 10)?,
                _ => return None,
            };
            push(meant).map(|()| length + 2)
        }
        _ => None,
    }
}

fn number(digits: &[u8], radix: u32) -> Option<u32> {
    // A sign must be rejected here: `from_str_radix` accepts one, but an escape cannot have one.
    let digits = std::str::from_utf8(digits).ok().filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()))?;
    u32::from_str_radix(digits, radix).ok()
}
