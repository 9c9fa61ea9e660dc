//! Images of rows: how an upload names them, and the references that are stored in their place.
//!
//! An uploaded row has `images: [{"bytes_b64": "…"}]`, or `[{"file": "a/b.png"}]` for a file of a zip that is uploaded with the rows. A
//! stored row has references in the same places: SHA-256, media type, width and height.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{PROMPT, brief, kind};
use crate::digest::Sha256Digest;

/// The column that holds the images of a row.
pub const IMAGES: &str = "images";
/// Maximum number of images of one row.
pub const MAX_IMAGES_PER_ROW: usize = 16;

/// File formats of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ImageFormat {
    /// PNG, Portable Network Graphics.
    #[serde(rename = "image/png")]
    Png,
    /// JPEG, with any number of components.
    #[serde(rename = "image/jpeg")]
    Jpeg,
    /// WebP, lossy, lossless or extended.
    #[serde(rename = "image/webp")]
    Webp,
    /// GIF, of which models read the first frame.
    #[serde(rename = "image/gif")]
    Gif,
}

impl ImageFormat {
    /// Returns the format of a file by its first bytes, of which 12 are enough.
    pub fn of(start: &[u8]) -> Option<Self> {
        match start {
            [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some(Self::Png),
            [0xff, 0xd8, 0xff, ..] => Some(Self::Jpeg),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(Self::Webp),
            [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some(Self::Gif),
            _ => None,
        }
    }

    /// Returns the media type, such as `image/png`.
    pub fn media_type(self) -> &'static str {
        match self {
            Self::Png => "image/png",
            Self::Jpeg => "image/jpeg",
            Self::Webp => "image/webp",
            Self::Gif => "image/gif",
        }
    }
}

/// A reference to a stored image, as rows and rewards have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRef {
    /// SHA-256 of the image's bytes.
    pub sha256: Sha256Digest,
    /// Format of the image.
    pub media_type: ImageFormat,
    /// Width of the image, in pixels.
    pub width: u32,
    /// Height of the image, in pixels.
    pub height: u32,
}

/// An image as an uploaded row names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SentImage<'a> {
    /// The bytes of the image, in base64.
    Base64(&'a str),
    /// The name of a file in the uploaded zip.
    File(&'a str),
}

/// A stable error code in `snake_case`, and a text on how to fix the row.
pub type ImageError = (&'static str, String);

/// Stores the images of uploaded rows.
pub trait ImageSink: fmt::Debug + Send {
    /// Checks and stores one image.
    ///
    /// # Errors
    /// Says what is wrong with the image, and what to do.
    fn store(&mut self, image: SentImage<'_>) -> Result<ImageRef, ImageError>;
}

/// Replaces the images of a row by references, if it has any. Without a `sink` images are refused.
pub(super) fn resolve(row: &mut Map<String, Value>, sink: Option<&mut dyn ImageSink>) -> Result<(), ImageError> {
    if row.contains_key("image") {
        return Err(("images_unsupported", "the column 'image': put it into a list in the column 'images'".to_owned()));
    }
    let Some(images) = row.get_mut(IMAGES) else { return Ok(()) };
    let Some(sink) = sink else {
        let detail = "the column 'images' contains images, which only POST /datasets stores: upload these rows there, as a dataset of their own";
        return Err(("images_unsupported", detail.to_owned()));
    };
    let Value::Array(images) = images else {
        let detail = format!("the column 'images' is {}, but must be a list", kind(images));
        return Err(("invalid_image", detail));
    };
    if images.len() > MAX_IMAGES_PER_ROW {
        let detail = format!("the row has {} images, but at most {MAX_IMAGES_PER_ROW} are supported", images.len());
        return Err(("too_many_images", detail));
    }
    for (index, image) in images.iter_mut().enumerate() {
        let at = |detail: String| format!("image {index} of the row: {detail}");
        let sent = sent_image(image).map_err(|detail| ("invalid_image", at(detail)))?;
        let stored = sink.store(sent).map_err(|(code, detail)| (code, at(detail)))?;
        *image = serde_json::to_value(stored).map_err(|error| ("invalid_image", at(error.to_string())))?;
    }
    match images.is_empty() || has_user_message(row.get(PROMPT)) {
        true => Ok(()),
        false => {
            let detail = "a row with images needs a chat as its prompt, in which the images come before the first user message: [{\"role\": \"user\", \"content\": \"…\"}]";
            Err(("images_need_chat", detail.to_owned()))
        }
    }
}

fn sent_image(image: &Value) -> Result<SentImage<'_>, String> {
    const FORMS: &str =
        "write {\"bytes_b64\": \"…\"}, or {\"file\": \"a/b.png\"} for a file of the zip in the form field 'images'";
    let Value::Object(fields) = image else {
        return Err(format!("it is {}: {FORMS}", kind(image)));
    };
    let mut fields = fields.iter();
    match (fields.next(), fields.next()) {
        (Some((name, Value::String(text))), None) if name == "bytes_b64" => Ok(SentImage::Base64(text)),
        (Some((name, Value::String(text))), None) if name == "file" => Ok(SentImage::File(text)),
        (Some((name, _)), _) if name != "bytes_b64" && name != "file" => {
            Err(format!("the field '{}' is unknown: {FORMS}", brief(name)))
        }
        _ => Err(FORMS.to_owned()),
    }
}

/// Returns whether a prompt is a chat with a user message.
fn has_user_message(prompt: Option<&Value>) -> bool {
    let messages = prompt.and_then(Value::as_array);
    messages.is_some_and(|messages| messages.iter().any(|message| message["role"] == "user"))
}

/// Returns the references to the images of a stored row; empty if it has none. `columns` may be the whole row, or the row without its
/// prompt.
pub fn image_refs(columns: &Map<String, Value>) -> Vec<ImageRef> {
    let images = columns.get(IMAGES).and_then(Value::as_array);
    let read = |image: &Value| serde_json::from_value(image.clone()).ok();
    images.and_then(|images| images.iter().map(read).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A sink that stores nothing.
    #[derive(Debug)]
    struct Blank;

    impl ImageSink for Blank {
        fn store(&mut self, image: SentImage<'_>) -> Result<ImageRef, ImageError> {
            match image {
                SentImage::Base64(bytes) => {
                    let sha256 = Sha256Digest::of(bytes);
                    Ok(ImageRef { sha256, media_type: ImageFormat::Png, width: 2, height: 3 })
                }
                SentImage::File(name) => Err(("missing_file", format!("no '{name}'"))),
            }
        }
    }

    fn resolved(mut row: Value) -> Result<Value, (&'static str, String)> {
        resolve(row.as_object_mut().unwrap(), Some(&mut Blank)).map(|()| row)
    }

    #[test]
    fn images_become_references_in_their_places() {
        let chat = json!([{"role": "user", "content": "What is it?"}]);
        let row =
            resolved(json!({"prompt": chat, "images": [{"bytes_b64": "AA"}, {"bytes_b64": "BB"}], "answer": "4"}))
                .unwrap();
        let refs = image_refs(row.as_object().unwrap());
        assert_eq!(refs.iter().map(|image| image.sha256).collect::<Vec<_>>(), ["AA", "BB"].map(Sha256Digest::of));
        assert_eq!(
            row["images"][0],
            json!({"sha256": Sha256Digest::of("AA"), "media_type": "image/png", "width": 2, "height": 3})
        );
        assert!(image_refs(resolved(json!({"prompt": "text", "images": []})).unwrap().as_object().unwrap()).is_empty());
    }

    #[test]
    fn other_forms_of_images_are_refused_by_name() {
        let chat = json!([{"role": "user", "content": "What is it?"}]);
        for (images, code, text) in [
            (json!("x"), "invalid_image", "is a string, but must be a list"),
            (json!([1]), "invalid_image", "image 0 of the row: it is a number"),
            (json!([{"bytes_b64": "A"}, {}]), "invalid_image", "image 1 of the row: write"),
            (json!([{"path": "/etc/passwd"}]), "invalid_image", "the field 'path' is unknown"),
            (json!([{"sha256": "0"}]), "invalid_image", "the field 'sha256' is unknown"),
            (json!([{"bytes_b64": "A", "file": "b"}]), "invalid_image", "write"),
            (json!([{"bytes_b64": 5}]), "invalid_image", "write"),
            (json!([{"file": "b.png"}]), "missing_file", "image 0 of the row: no 'b.png'"),
            (json!(vec![json!({"bytes_b64": "A"}); MAX_IMAGES_PER_ROW + 1]), "too_many_images", "17 images"),
        ] {
            let (found, detail) = resolved(json!({"prompt": chat, "images": images})).unwrap_err();
            assert!(found == code && detail.contains(text), "{images}: {found}: {detail}");
        }
        for prompt in [json!("text"), json!([{"role": "system", "content": "text"}])] {
            let refused = resolved(json!({"prompt": prompt, "images": [{"bytes_b64": "A"}]})).unwrap_err();
            assert_eq!(refused.0, "images_need_chat");
        }
        assert!(resolved(json!({"prompt": chat, "image": {"bytes_b64": "A"}})).unwrap_err().1.contains("'images'"));
    }
}
