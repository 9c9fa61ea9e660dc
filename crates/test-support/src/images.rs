//! Small images and zips, made byte by byte so that tests can break them.

/// Returns the beginning of a PNG file with this size in pixels: enough for everything that reads only headers. Images of one
/// size differ in their `seed`.
pub fn png(width: u32, height: u32, seed: u8) -> Vec<u8> {
    let mut bytes = b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR".to_vec();
    bytes.extend(width.to_be_bytes());
    bytes.extend(height.to_be_bytes());
    bytes.extend([8, 2, 0, 0, 0, seed]);
    bytes
}

/// An entry of a zip.
#[derive(Debug, Clone)]
pub struct ZipEntry {
    /// Name of the file.
    pub name: String,
    /// The bytes as the zip has them.
    pub packed: Vec<u8>,
    /// 0 = stored, 8 = deflate.
    pub method: u16,
    /// Size and CRC-32 that the zip claims for the unpacked bytes.
    pub claimed: (u32, u32),
    /// Mode of Unix: `0o100644` is a file, `0o120777` a link.
    pub mode: u32,
}

impl ZipEntry {
    /// Returns a file that is not compressed.
    pub fn stored(name: &str, bytes: &[u8]) -> Self {
        let claimed = (u32::try_from(bytes.len()).unwrap_or(u32::MAX), crc32(bytes));
        Self { name: name.to_owned(), packed: bytes.to_vec(), method: 0, claimed, mode: 0o100_644 }
    }
}

/// Returns a zip with these entries, in order.
pub fn zip_of(entries: &[ZipEntry]) -> Vec<u8> {
    let (mut zip, mut list) = (Vec::new(), Vec::new());
    let half = |number: usize| u16::try_from(number).unwrap_or(u16::MAX).to_le_bytes();
    let whole = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes();
    for ZipEntry { name, packed, method, claimed: (size, crc), mode } in entries {
        let mut about = vec![20, 0, 0, 0];
        about.extend(method.to_le_bytes());
        about.extend([0, 0, 0x21, 0x50]);
        about.extend(crc.to_le_bytes());
        about.extend(whole(packed.len()));
        about.extend(size.to_le_bytes());
        about.extend(half(name.len()));
        about.extend([0, 0]);
        list.extend(b"PK\x01\x02\x14\x03");
        list.extend(&about);
        list.extend([0; 6]);
        list.extend((mode << 16).to_le_bytes());
        list.extend(whole(zip.len()));
        list.extend(name.as_bytes());
        zip.extend(b"PK\x03\x04");
        zip.extend(&about);
        zip.extend(name.as_bytes());
        zip.extend(packed);
    }
    let (begin, size) = (zip.len(), list.len());
    zip.extend(list);
    zip.extend(b"PK\x05\x06\0\0\0\0");
    zip.extend(half(entries.len()));
    zip.extend(half(entries.len()));
    zip.extend(whole(size));
    zip.extend(whole(begin));
    zip.extend([0, 0]);
    zip
}

/// Returns the CRC-32 of ISO 3309, as zip uses it.
pub fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
    !bytes.iter().fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}
