//! Where log lines go.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, stderr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;

use thiserror::Error;
use tracing::level_filters::LevelFilter;

use crate::config::LogConfig;

/// Why nothing can be logged.
#[derive(Debug, Error)]
pub enum LogError {
    /// The file cannot be opened.
    #[error("--log-file: cannot open {path:?}")]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Sends log lines where `config` says, from now on. To be called once.
///
/// Lines are written as they come, without a buffer: what was logged before a crash can be read after it.
pub fn start(config: &LogConfig) -> Result<(), LogError> {
    let lines =
        tracing_subscriber::fmt().with_max_level(level(config.verbosity)).with_target(config.verbosity > 1);
    match &config.file {
        None => lines.with_ansi(stderr().is_terminal()).with_writer(stderr).init(),
        Some(path) => {
            let open = |path| -> io::Result<File> {
                OpenOptions::new().create(true).append(true).mode(0o640).open(path)
            };
            let file = open(path).map_err(|source| LogError::Open { path: path.clone(), source })?;
            lines.with_ansi(false).with_writer(Arc::new(file)).init();
        }
    }
    Ok(())
}

fn level(verbosity: u8) -> LevelFilter {
    match verbosity {
        0 => LevelFilter::WARN,
        1 => LevelFilter::INFO,
        2 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    }
}
