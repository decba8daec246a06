//! Output of log lines.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fs::File;
use std::io::{self, IsTerminal, stderr};
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;
use tracing::Dispatch;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::util::SubscriberInitExt;

use crate::output_file::{admit, open_to_append};
use crate::standard_stream;

#[derive(Debug, Error)]
pub enum LogError {
    #[error("--log-file: cannot open {path:?}")]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// `--log-format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Lines for human readers.
    #[default]
    Text,
    /// One JSON object per line. Its keys are `timestamp`, `level`, `target`, `message` and the
    /// line's fields.
    Json,
}

impl LogFormat {
    pub const ALL: [Self; 2] = [Self::Text, Self::Json];

    /// Name of the format in the flag.
    pub fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }
}

/// `--log-file`, `--log-format` and `-v`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogConfig {
    /// File, or standard error if `None`.
    pub file: Option<PathBuf>,
    pub format: LogFormat,
    /// Number of `-v` flags. 0 logs warnings, 1 also information, 2 also debugging, and 3
    /// everything.
    pub verbosity: u8,
}

/// Starts logging to the destination in `config`, whose descriptor remains open and is returned.
/// Call this only once.
///
/// Each line is written immediately and without a buffer, so that the last lines before a crash are
/// not lost.
pub fn start(config: &LogConfig) -> Result<RawFd, LogError> {
    let fd = match &config.file {
        None => {
            subscriber(config, stderr().is_terminal(), stderr).init();
            stderr().as_raw_fd()
        }
        Some(path) => {
            let open = |path: &PathBuf| -> io::Result<File> {
                let file = open_to_append(path)?;
                admit(&file, path)?;
                standard_stream::append_at(path)?;
                Ok(file)
            };
            let file =
                open(path).map_err(|source| LogError::Open { path: path.clone(), source })?;
            let fd = file.as_raw_fd();
            subscriber(config, false, Arc::new(file)).init();
            fd
        }
    };
    Ok(fd)
}

/// Logs panics, so that they reach the log file and have its format. The line is complete before
/// the process aborts, because lines are written without a buffer. Call this after [`start`].
///
/// If the log has a file of its own, panics are also printed to standard error, because the file
/// may be full.
pub fn log_panics(config: &LogConfig) {
    let print = std::panic::take_hook();
    let has_file = config.file.is_some();
    std::panic::set_hook(Box::new(move |panic| {
        if has_file {
            print(panic);
        }
        let thread = std::thread::current();
        let location = panic.location().map(ToString::to_string);
        tracing::error!(
            thread = thread.name(),
            location,
            panic = panic.payload_as_str(),
            "Panic: please report this as a bug"
        );
        // To resolve names, the backtrace opens the program file. If the thread's seccomp filter
        // allows no open(), the process ends here.
        let backtrace = Backtrace::capture();
        if backtrace.status() == BacktraceStatus::Captured {
            tracing::error!(%backtrace, "Backtrace of the panic");
        }
    }));
}

fn subscriber<W>(config: &LogConfig, with_colors: bool, writer: W) -> Dispatch
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let lines =
        tracing_subscriber::fmt().with_max_level(level(config.verbosity)).with_writer(writer);
    match config.format {
        LogFormat::Text => {
            lines.with_target(config.verbosity > 1).with_ansi(with_colors).finish().into()
        }
        // The VMM uses no tracing spans.
        LogFormat::Json => lines
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .finish()
            .into(),
    }
}

fn level(verbosity: u8) -> LevelFilter {
    match verbosity {
        0 => LevelFilter::WARN,
        1 => LevelFilter::INFO,
        2 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    }
}

/// Runs `act` with a separate subscriber, which receives the log lines of this thread.
///
/// Another subscriber exists at the same time. If there were only one, tracing would decide about
/// each new call site by the subscriber of the thread that reaches it first (tracing-core,
/// `has_just_one` in callsite.rs). This thread may belong to another test.
#[cfg(any(test, feature = "testing"))]
pub fn with_subscriber<T>(subscriber: impl Into<tracing::Dispatch>, act: impl FnOnce() -> T) -> T {
    let _other = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::new());
    tracing::dispatcher::with_default(&subscriber.into(), act)
}

/// Counts how often a log line was due.
#[doc(hidden)]
#[derive(Default)]
pub struct Occasions(AtomicU64);

impl Occasions {
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds one to the count. Returns the count if it is a power of two: 1, 2, 4, 8 and so on.
    pub fn another(&self) -> Option<u64> {
        let times = self.0.fetch_add(1, Ordering::Relaxed) + 1;
        times.is_power_of_two().then_some(times)
    }
}

/// Logs an event that a guest can repeat: `rate_limited!(warn, fields, "message")`. The line is
/// logged the first, second, fourth, eighth time and so on, with the count. The guest therefore
/// cannot fill the host's disk, and the host's log cannot slow the guest down. Each call site has
/// its own count for all devices. Metrics provide exact numbers.
#[macro_export]
macro_rules! rate_limited {
    ($level:ident, $($line:tt)+) => {{
        static OCCASIONS: $crate::log::Occasions = $crate::log::Occasions::new();
        if let Some(times) = OCCASIONS.another() {
            $crate::tracing::$level!(times, $($line)+);
        }
    }};
}
pub use rate_limited;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flood_of_occasions_causes_few_lines() {
        let occasions = Occasions::new();
        let logged: Vec<u64> = (0..1000).filter_map(|_| occasions.another()).collect();
        assert_eq!(logged, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]);
    }

    #[test]
    fn each_call_site_logs_its_own_count() {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        with_subscriber(subscriber, || {
            for round in 0..5 {
                rate_limited!(warn, round, "one place");
                rate_limited!(error, round, "another");
            }
        });
        let text = String::from_utf8(lines.0.lock().clone()).unwrap();
        let of = |place| {
            text.lines().filter(|line| line.contains(place)).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!((of("one place").len(), of("another").len()), (3, 3), "{text}");
        assert!(of("another")[2].contains("times=4 round=3"), "{text}");
    }

    #[test]
    fn line_of_json_has_the_fields_as_keys() {
        let lines = Lines::default();
        let writer = lines.clone();
        let config = LogConfig { format: LogFormat::Json, ..LogConfig::default() };
        let subscriber = subscriber(&config, true, move || writer.clone());
        with_subscriber(subscriber, || {
            let error = io::Error::other("no \"room\"\n");
            rate_limited!(warn, id = "_disk0", bytes = 4096_u64, %error, "Cannot read");
            tracing::info!("without -v");
        });
        let text = String::from_utf8(lines.0.lock().clone()).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        let mut line: serde_json::Value = serde_json::from_str(&text).unwrap();
        let time = line.as_object_mut().unwrap().remove("timestamp").unwrap();
        // UTC with microseconds, for example 2026-01-31T12:00:00.000001Z.
        let time = time.as_str().unwrap();
        assert!(time.parse::<jiff::Timestamp>().is_ok() && time.len() == 27, "{time}");
        let expected = serde_json::json!({
            "level": "WARN", "target": module_path!(), "message": "Cannot read", "times": 1,
            "id": "_disk0", "bytes": 4096, "error": "no \"room\"\n",
        });
        assert_eq!(line, expected);
    }

    /// Environment variable of a child process that panics: format and file of its log.
    const CHILD: &str = "FORESHORE_TEST_OF_PANICS";

    /// Panics as a program with `panic = "abort"`.
    fn panic_and_abort(log: &str) {
        let (format, file) = log.split_once(' ').unwrap();
        let format = LogFormat::ALL.into_iter().find(|known| known.name() == format).unwrap();
        let file = (!file.is_empty()).then(|| PathBuf::from(file));
        let config = LogConfig { file, format, verbosity: 0 };
        start(&config).unwrap();
        log_panics(&config);
        let log = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            log(panic);
            std::process::abort();
        }));
        let thread = std::thread::Builder::new().name("_disk".to_owned());
        thread.spawn(|| panic!("two\n\"lines\"")).unwrap().join().unwrap_err();
    }

    #[test]
    fn panic_is_one_line_of_the_log() {
        const NAME: &str = "log::tests::panic_is_one_line_of_the_log";
        if let Ok(log) = std::env::var(CHILD) {
            return panic_and_abort(&log);
        }
        let dir = tempfile::tempdir().unwrap();
        let log = |format: &str, file: Option<&str>| {
            let path = file.map(|name| dir.path().join(name));
            let shown = path.iter().map(|path| path.display().to_string()).collect::<String>();
            let child = std::process::Command::new(std::env::current_exe().unwrap())
                .args([NAME, "--exact", "--nocapture"])
                .env(CHILD, format!("{format} {shown}"))
                .env("RUST_BACKTRACE", "0")
                .output()
                .unwrap();
            assert!(!child.status.success());
            let printed = String::from_utf8(child.stderr).unwrap();
            let Some(path) = path else { return printed };
            // The file may be full.
            assert!(printed.contains("panicked at") && printed.contains("two\n"), "{printed}");
            std::fs::read_to_string(path).unwrap()
        };
        let text = log("text", Some("text"));
        assert_eq!(text.lines().count(), 1, "{text}");
        for field in ["ERROR", "thread=\"_disk\"", "location=\"", "panic=\"two\\n\\\"lines\\\"\""] {
            assert!(text.contains(field), "{field} in {text}");
        }
        for file in [Some("json"), None] {
            let text = log("json", file);
            assert_eq!(text.lines().count(), 1, "{text}");
            let line: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(line["level"], "ERROR");
            assert_eq!(line["thread"], "_disk");
            assert_eq!(line["panic"], "two\n\"lines\"");
            assert!(line["location"].as_str().unwrap().contains("log.rs:"), "{line}");
        }
    }

    #[derive(Clone, Default)]
    struct Lines(Arc<parking_lot::Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, data: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(data);
            Ok(data.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
}
