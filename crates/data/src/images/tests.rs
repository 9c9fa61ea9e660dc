use std::io::Write;

use flate2::Compression;
use flate2::write::DeflateEncoder;
use rlood_test_support::images::{ZipEntry, crc32, png, zip_of};

use super::*;

const LIMITS: ImageLimits = ImageLimits { image_bytes: 1000, pixels: 10_000, total_bytes: 5000, files: 5 };

fn deflated(name: &str, bytes: &[u8]) -> ZipEntry {
    let mut packer = DeflateEncoder::new(Vec::new(), Compression::best());
    packer.write_all(bytes).unwrap();
    let claimed = (u32::try_from(bytes.len()).unwrap(), crc32(bytes));
    ZipEntry { packed: packer.finish().unwrap(), method: 8, claimed, ..ZipEntry::stored(name, b"") }
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> (Self, Images) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("stored")).unwrap();
        let images = Images::new(&folder.path().join("stored"), LIMITS);
        (Self(folder), images)
    }

    fn open(&self, images: &Images, entries: &[ZipEntry]) -> Result<(), ImageError> {
        self.open_bytes(images, &zip_of(entries))
    }

    fn open_bytes(&self, images: &Images, zip: &[u8]) -> Result<(), ImageError> {
        let path = self.0.path().join("zip");
        std::fs::write(&path, zip).unwrap();
        images.open_zip(&path)
    }

    /// Returns the names of everything that was written.
    fn stored(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path().join("stored")).unwrap();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

#[test]
fn images_are_stored_once_under_their_hash() {
    let (folder, mut images) = Folder::new();
    let (one, two) = (png(20, 30, 1), png(5, 5, 2));
    folder
        .open(
            &images,
            &[ZipEntry::stored("a/one.png", &one), deflated("two.png", &two), ZipEntry::stored("three.txt", b"x")],
        )
        .unwrap();
    let first = images.store(SentImage::File("a/one.png")).unwrap();
    assert_eq!((first.width, first.height, first.media_type.media_type()), (20, 30, "image/png"));
    assert_eq!(images.store(SentImage::Base64(&base64(&one))).unwrap(), first);
    assert_eq!(images.store(SentImage::File("a/one.png")).unwrap(), first);
    let second = images.store(SentImage::File("two.png")).unwrap();
    let mut names = [first.sha256, second.sha256].map(|sha256| sha256.to_string());
    names.sort();
    assert_eq!(folder.stored(), names);
    let counts = images.counts();
    assert_eq!((counts.stored, counts.stored_bytes, counts.unused_files), (2, (one.len() + two.len()) as u64, 1));
    assert_eq!(std::fs::read(folder.0.path().join("stored").join(first.sha256.to_string())).unwrap(), one);
}

#[test]
fn a_zip_with_unsafe_entries_is_refused_as_a_whole() {
    let file = |name: &str| ZipEntry::stored(name, &png(1, 1, 0));
    let link = ZipEntry { mode: 0o120_777, ..file("link.png") };
    let device = ZipEntry { mode: 0o020_666, ..file("device") };
    for (entries, text) in [
        (vec![file("good.png"), file("../up.png")], "'../up.png' leads outside"),
        (vec![file("a/../../b.png")], "leads outside"),
        (vec![file("/etc/passwd")], "leads outside"),
        (vec![file("C:\\x.png")], "leads outside"),
        (vec![file("a\\b.png")], "leads outside"),
        (vec![file("good.png"), link], "'link.png' is a link"),
        (vec![device], "'device' is a link or a device"),
        (vec![file("same.png"), file("same.png")], "the same name"),
        (vec![], "no files"),
        ((0..6).map(|index| file(&format!("{index}.png"))).collect(), "6 files, but at most 5"),
    ] {
        let (folder, images) = Folder::new();
        let (code, detail) = folder.open(&images, &entries).unwrap_err();
        assert!(code == "invalid_zip" && detail.contains(text), "{detail}");
        assert!(folder.stored().is_empty());
    }
    let (folder, images) = Folder::new();
    assert!(folder.open_bytes(&images, b"not a zip").unwrap_err().1.contains("is not a zip"));
    let whole = zip_of(&[file("a.png")]);
    for end in 0..whole.len() {
        assert!(folder.open_bytes(&images, &whole[..end]).is_err(), "{end} bytes of a zip");
    }
}

#[test]
fn a_bomb_is_stopped_by_its_real_size() {
    let (folder, mut images) = Folder::new();
    let huge = deflated("bomb.png", &vec![0; 50_000_000]);
    assert!(huge.packed.len() < 100_000);
    // It claims to be small.
    let bomb = ZipEntry { claimed: (10, huge.claimed.1), ..huge };
    folder.open(&images, &[bomb]).unwrap();
    let (code, detail) = images.store(SentImage::File("bomb.png")).unwrap_err();
    assert!(code == "image_too_large" && detail.contains("bomb.png: the image has more than 1000 bytes"), "{detail}");

    let (folder, mut images) = Folder::new();
    let padded = |seed: u8| [png(1, 1, seed), vec![0; 900]].concat();
    let each: Vec<String> = (0..6).map(|seed| base64(&padded(seed))).collect();
    let mut codes = each.iter().map(|text| images.store(SentImage::Base64(text)).map_err(|(code, _)| code));
    assert!(codes.by_ref().take(5).all(|stored| stored.is_ok()));
    assert_eq!(codes.next(), Some(Err("too_large")), "more than all images may have together");
    assert_eq!(folder.stored().len(), 5);
}

#[test]
fn a_damaged_entry_and_an_unknown_compression_are_refused() {
    let (folder, mut images) = Folder::new();
    let bytes = png(2, 2, 0);
    let good = deflated("crc.png", &bytes);
    let entries = [
        ZipEntry { claimed: (26, 1), ..good },
        ZipEntry { method: 12, ..ZipEntry::stored("bzip2.png", &bytes) },
        ZipEntry { method: 8, ..ZipEntry::stored("torn.png", &bytes) },
    ];
    folder.open(&images, &entries).unwrap();
    for (name, text) in [
        ("crc.png", "checksum differs"),
        ("bzip2.png", "not supported, use deflate"),
        ("torn.png", "cannot be unpacked"),
    ] {
        let (code, detail) = images.store(SentImage::File(name)).unwrap_err();
        assert!(code == "invalid_zip" && detail.contains(text) && detail.contains(name), "{detail}");
    }
    let (code, detail) = images.store(SentImage::File("crc.PNG")).unwrap_err();
    assert!(code == "missing_file" && detail.contains("did you mean 'crc.png'?"), "{detail}");
    let (code, detail) = Images::checked_only(LIMITS).store(SentImage::File("a.png")).unwrap_err();
    assert!(code == "missing_file" && detail.contains("the form field 'images'"), "{detail}");
}

#[test]
fn bytes_that_are_no_supported_image_are_refused_by_name() {
    let (_folder, mut images) = Folder::new();
    for (bytes, code, text) in [
        (&b"BM......"[..], "invalid_image", "BMP is not supported: use PNG, JPEG, WebP or GIF"),
        (b"II*\0....", "invalid_image", "TIFF"),
        (b"<svg xmlns=''/>", "invalid_image", "SVG"),
        (b"\0\0\0\x1cftypavif", "invalid_image", "AVIF"),
        (b"%PDF-1.7", "invalid_image", "PDF"),
        (b"hello", "invalid_image", "this is no image"),
        (b"", "invalid_image", "this is no image"),
        (&png(0, 5, 0), "invalid_image", "damaged"),
        (&png(101, 100, 0), "too_many_pixels", "101 × 100 pixels"),
        (&png(u32::MAX, u32::MAX, 0), "too_many_pixels", "4294967295"),
    ] {
        let (found, detail) = images.store(SentImage::Base64(&base64(bytes))).unwrap_err();
        assert!(found == code && detail.contains(text), "{found}: {detail}");
    }
    for nonsense in ["*", "data:image/png;base64,iVBO", "iVBO\nRw0K"] {
        assert_eq!(images.store(SentImage::Base64(nonsense)).unwrap_err().0, "image_base64", "{nonsense}");
    }
}

#[test]
fn the_header_of_each_format_says_its_size_and_a_torn_one_is_no_panic() {
    let jpeg = b"\xff\xd8\xff\xe0\x00\x04ab\xff\xff\xc2\x00\x11\x08\x00\x07\x00\x09\x03".to_vec();
    let gif = b"GIF89a\x09\x00\x07\x00".to_vec();
    let lossy = b"RIFF\0\0\0\0WEBPVP8 \0\0\0\0\0\0\0\x9d\x01\x2a\x09\x00\x07\x40".to_vec();
    let lossless = [b"RIFF\0\0\0\0WEBPVP8L\0\0\0\0\x2f".as_slice(), &(8_u32 | 6 << 14).to_le_bytes()].concat();
    let extended = b"RIFF\0\0\0\0WEBPVP8X\0\0\0\0\0\0\0\0\x08\0\0\x06\0\0".to_vec();
    for (bytes, media_type) in [
        (png(9, 7, 0), "image/png"),
        (jpeg, "image/jpeg"),
        (gif, "image/gif"),
        (lossy, "image/webp"),
        (lossless, "image/webp"),
        (extended, "image/webp"),
    ] {
        let (format, width, height) = header::read(&bytes).unwrap();
        assert_eq!((format.media_type(), width, height), (media_type, 9, 7));
        for end in 0..bytes.len() {
            let _ = header::read(&bytes[..end]);
        }
    }
    // A segment of length 0 would be read for ever.
    assert!(header::read(b"\xff\xd8\xff\xe0\x00\x00\xff\xe0\x00\x00").is_err());
}
