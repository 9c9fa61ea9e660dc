//! `rlood export-checkpoint`: writes a checkpoint in another format, in its own process. It reads a task from standard input
//! (one line of JSON) and writes lines to standard output: progress, and finally the report.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use rlood_types::certificate;

use crate::args::OneShotArgs;
use crate::engine::gguf::{self, GgufInput};
use crate::engine::merge::{MergeInput, MergedDtype, base_dtype, merge};
use crate::engine::{self, error::EngineError};
use crate::export::{
    ExportDtype, ExportError, ExportFormat, ExportLine, ExportReport, ExportResult, ExportTask, Survived, advice,
};
use crate::modelcard::gguf::Kind;
use crate::modelcard::{self, ModelFile};
use crate::one_shot::{self, OneShotError, error_text};

/// Minimum time between two lines that report the export's progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// Runs `rlood export-checkpoint`: reads the task, writes the directory in the other format, and writes the report. The exit code
/// is 0 even if the report contains an error.
///
/// # Errors
/// Fails when standard input has no valid task, or the report cannot be written to standard output.
pub fn run(_args: &OneShotArgs) -> Result<ExitCode, OneShotError> {
    let task: ExportTask = one_shot::read_task()?;
    let report = match export(&task) {
        Ok(result) => ExportReport::Exported(result),
        Err(error) => ExportReport::Failed(failure(&error)),
    };
    one_shot::write_report(&ExportLine::Report(report))?;
    Ok(ExitCode::SUCCESS)
}

fn failure(error: &EngineError) -> ExportError {
    let code = match error {
        EngineError::Model(_) => "model_invalid",
        EngineError::Adapter(_) => "adapter_invalid",
        EngineError::ModelNotFinite { .. } => "not_finite",
        EngineError::Refused(_) => "unsupported",
        EngineError::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => "disk_full",
        _ => "engine",
    };
    ExportError { code: code.to_owned(), message: error_text(error) }
}

fn export(task: &ExportTask) -> Result<ExportResult, EngineError> {
    let mut last_progress: Option<Instant> = None;
    let mut progress = |done, total| {
        if last_progress.is_none_or(|last_progress| last_progress.elapsed() >= PROGRESS_INTERVAL) || done == total {
            last_progress = Some(Instant::now());
            // A failed write of the progress is ignored: if the server is gone, the closed standard input ends this process.
            let _ = one_shot::write_report(&ExportLine::Progress { done, total });
        }
        true
    };
    let (dtype, left) = match task.request.format {
        ExportFormat::Merged => merged(task, &mut progress)?,
        ExportFormat::Gguf => gguf_model(task, &mut progress)?,
        ExportFormat::GgufAdapter => (gguf_adapter(task)?, None),
    };
    // An export for llama.cpp stays a single file.
    if task.request.format == ExportFormat::Merged && task.checkpoint_dir.join(certificate::FILE).is_file() {
        let (from, to) = (task.checkpoint_dir.join(certificate::FILE), task.out_dir.join(certificate::FILE));
        std::fs::copy(&from, &to).map_err(|source| EngineError::Io { path: to, source })?;
    }
    let survived = left.map(|(left, _)| Survived { fraction: left.fraction, cosine: left.cosine });
    let advice = left.zip(survived).and_then(|((_, largest), survived)| advice(dtype, survived, largest));
    let io = |source| EngineError::Io { path: task.out_dir.clone(), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(&task.out_dir).map_err(io)? {
        let entry = entry.map_err(io)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        files.push(ModelFile { name, size_bytes: entry.metadata().map_err(io)?.len() });
    }
    files.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(ExportResult { dtype, files: modelcard::hash_files(&task.out_dir, &files)?, survived, advice })
}

/// The data type of what was written; how much of the update survives, and the largest weight.
type Exported = (ExportDtype, Option<(engine::merge::Survived, f32)>);

fn merged(task: &ExportTask, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<Exported, EngineError> {
    let dtype = match task.request.dtype {
        None => None,
        Some(ExportDtype::Float32) => Some(MergedDtype::Float32),
        Some(ExportDtype::Float16) => Some(MergedDtype::Float16),
        Some(ExportDtype::Bfloat16) => Some(MergedDtype::Bfloat16),
        Some(ExportDtype::Q8_0) => return Err(EngineError::Input("q8_0 is a data type of the format gguf".to_owned())),
    };
    let input = MergeInput {
        model_dir: &task.model_dir,
        checkpoint_dir: &task.checkpoint_dir,
        is_adapter: task.is_adapter,
        dtype,
        four_bit: task.four_bit,
        out_dir: &task.out_dir,
    };
    let merged = merge(input, progress)?.ok_or_else(stopped)?;
    Ok((of_merged(merged.dtype), merged.survived.map(|survived| (survived, merged.largest))))
}

fn gguf_model(task: &ExportTask, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<Exported, EngineError> {
    let dtype = match task.request.dtype {
        Some(dtype) => dtype,
        None => of_merged(base_dtype(&task.model_dir)?),
    };
    let input = GgufInput {
        model_dir: &task.model_dir,
        checkpoint_dir: &task.checkpoint_dir,
        is_adapter: task.is_adapter,
        four_bit: task.four_bit,
        kind: kind_of(dtype),
        context_length: task.request.context_length.map(|length| usize::try_from(length).unwrap_or(usize::MAX)),
        out: &task.out_dir.join("model.gguf"),
    };
    let written = gguf::write_model(input, progress)?.ok_or_else(stopped)?;
    Ok((dtype, written.survived.map(|survived| (survived, written.largest))))
}

fn gguf_adapter(task: &ExportTask) -> Result<ExportDtype, EngineError> {
    if !task.is_adapter {
        let why = "the checkpoint has all weights and no adapter: export it with format gguf";
        return Err(EngineError::Input(why.to_owned()));
    }
    let dtype = task.request.dtype.unwrap_or(ExportDtype::Float32);
    let out = task.out_dir.join("adapter.gguf");
    gguf::write_adapter(&task.model_dir, &task.checkpoint_dir, kind_of(dtype), &out)?;
    Ok(dtype)
}

fn stopped() -> EngineError {
    EngineError::Input("the export of the checkpoint was stopped".to_owned())
}

fn of_merged(dtype: MergedDtype) -> ExportDtype {
    match dtype {
        MergedDtype::Float32 => ExportDtype::Float32,
        MergedDtype::Float16 => ExportDtype::Float16,
        MergedDtype::Bfloat16 => ExportDtype::Bfloat16,
    }
}

fn kind_of(dtype: ExportDtype) -> Kind {
    match dtype {
        ExportDtype::Float32 => Kind::F32,
        ExportDtype::Float16 => Kind::F16,
        ExportDtype::Bfloat16 => Kind::Bf16,
        ExportDtype::Q8_0 => Kind::Q8_0,
    }
}
