//! Reads the reward `python`: a function with TRL's signature that runs on the worker's machine.

use super::service::read_limits;
use crate::spec::PythonPlan;
use crate::spec::reader::{Field, Reader, shown};

/// Maximum length of the path, in bytes.
const MAX_PATH_BYTES: usize = 4096;

pub(super) fn read_python(reader: &Reader<'_>) -> PythonPlan {
    let file = reader.required("file", "name the Python file, such as \"rewards.py\": a path on the server's machine");
    let function = reader.required("function", "name the function in the file, such as \"accuracy\"");
    PythonPlan {
        file: read_file(&file),
        function: read_function(&function),
        sha256: None,
        processes: reader.field("processes").whole(1..=256).unwrap_or(1),
        service: read_limits(reader, 32),
    }
}

fn read_file(field: &Field<'_>) -> String {
    let Some(file) = field.nonempty(MAX_PATH_BYTES) else { return String::new() };
    if let Some((file, function)) = file.rsplit_once(".py:") {
        let detail = format!(
            "give the file and the function apart: \"file\": \"{0}.py\", \"function\": \"{1}\"",
            shown(file),
            shown(function)
        );
        field.fail("invalid_value", detail);
    } else if !file.ends_with(".py") || file.contains('\0') {
        field.fail("invalid_value", "the field 'file' must be the path of a Python file, which ends in .py");
    }
    file.to_owned()
}

fn read_function(field: &Field<'_>) -> String {
    let Some(function) = field.nonempty(64) else { return String::new() };
    let is_name = |part: &str| {
        let mut characters = part.chars();
        characters.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
            && characters.all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    if !function.split('.').all(is_name) {
        field.fail(
            "invalid_value",
            "the field 'function' must be the name of one function: letters, digits and '_', as in accuracy or Judge.score",
        );
    }
    function.to_owned()
}
