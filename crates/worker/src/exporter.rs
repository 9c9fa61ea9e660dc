//! `rlood export-checkpoint`: writes a checkpoint in another format, in its own process. It reads a task from standard input
//! (one line of JSON) and writes lines to standard output: progress, and finally the report.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::args::OneShotArgs;
use crate::engine::error::EngineError;
use crate::engine::merge::{MergeInput, MergedDtype, merge};
use crate::export::{
    ExportDtype, ExportError, ExportFormat, ExportLine, ExportReport, ExportResult, ExportTask, Survived, advice,
};
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
        EngineError::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => "disk_full",
        _ => "engine",
    };
    ExportError { code: code.to_owned(), message: error_text(error) }
}

fn export(task: &ExportTask) -> Result<ExportResult, EngineError> {
    let ExportFormat::Merged = task.request.format;
    let input = MergeInput {
        model_dir: &task.model_dir,
        checkpoint_dir: &task.checkpoint_dir,
        is_adapter: task.is_adapter,
        dtype: task.request.dtype.map(|dtype| match dtype {
            ExportDtype::Float32 => MergedDtype::Float32,
            ExportDtype::Float16 => MergedDtype::Float16,
            ExportDtype::Bfloat16 => MergedDtype::Bfloat16,
        }),
        four_bit: task.four_bit,
        out_dir: &task.out_dir,
    };
    let mut last_progress: Option<Instant> = None;
    let mut progress = |done, total| {
        if last_progress.is_none_or(|last_progress| last_progress.elapsed() >= PROGRESS_INTERVAL) || done == total {
            last_progress = Some(Instant::now());
            // A failed write of the progress is ignored: if the server is gone, the closed standard input ends this process.
            let _ = one_shot::write_report(&ExportLine::Progress { done, total });
        }
        true
    };
    let merged = merge(input, &mut progress)?
        .ok_or_else(|| EngineError::Input("the export of the checkpoint was stopped".to_owned()))?;
    let dtype = match merged.dtype {
        MergedDtype::Float32 => ExportDtype::Float32,
        MergedDtype::Float16 => ExportDtype::Float16,
        MergedDtype::Bfloat16 => ExportDtype::Bfloat16,
    };
    let survived = merged.survived.map(|left| Survived { fraction: left.fraction, cosine: left.cosine });
    let advice = survived.and_then(|survived| advice(dtype, survived, merged.largest));
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
