//! Tests of the log and of events in redirected standard streams of the VMM. KVM is not needed.

mod support;

use std::fs::{self, File};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use support::{Vmm, foreshore};
use tempfile::TempDir;

const EARLIER: &str = "earlier output\n";

fn file() -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("all");
    fs::write(&path, EARLIER).unwrap();
    (folder, path)
}

/// Runs a VMM that does not find its kernel.
fn run(arguments: &[&str], [output, error]: [File; 2]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_foreshore"));
    command.args(["--kernel", "/nonexistent", "-v"]).args(arguments).stdout(output).stderr(error);
    command.output().unwrap()
}

fn create(path: &Path) -> File {
    File::create(path).unwrap()
}

fn append(path: &Path) -> File {
    File::options().append(true).open(path).unwrap()
}

#[test]
fn log_and_events_share_the_file_of_both_streams_without_overwriting() {
    for (log, events) in [
        ("/dev/stderr", "path=/dev/stdout"),
        ("/dev/fd/2", "path=/proc/self/fd/1"),
        ("/dev/stdout", "path=/dev/stdout"),
    ] {
        // `>all 2>&1`, `>all 2>all` and `>>all 2>&1`.
        for (open, is_shared) in
            [(create as fn(&Path) -> File, true), (create, false), (append, true)]
        {
            let (_folder, path) = file();
            let output = open(&path);
            let error = if is_shared { output.try_clone().unwrap() } else { open(&path) };
            let before = fs::read_to_string(&path).unwrap();
            let status =
                run(&["--log-file", log, "--event-monitor", events], [output, error]).status;
            let text = fs::read_to_string(&path).unwrap();
            assert_eq!(status.code(), Some(1), "{text}");
            assert!(text.starts_with(&before), "{text}");
            assert!(text.contains("foreshore: "), "no error message: {text}");
            assert!(text.contains(" INFO "), "no log: {text}");
            let events =
                text.split("\n\n").filter_map(|part| part.get(part.find('{')?..=part.rfind('}')?));
            let names: Vec<_> = events
                .map(|event| {
                    serde_json::from_str::<serde_json::Value>(event).unwrap()["event"].clone()
                })
                .collect();
            assert!(
                names.contains(&"starting".into()) && names.contains(&"shutdown".into()),
                "{text}"
            );
            assert!(!text.contains('\0'), "a hole: {text}");
        }
    }
}

#[test]
fn log_shows_the_port_that_the_kernel_has_chosen_for_metrics() {
    let folder = TempDir::new().unwrap();
    let api_socket = folder.path().join("api");
    let mut command = foreshore();
    command.arg("--api-socket").arg(api_socket).args(["--metrics", "0", "-v"]);
    let mut vmm = Vmm::spawn(folder, &mut command);
    TcpStream::connect(vmm.metrics_address()).unwrap();
}

/// The error that ends the VMM is in the log, unless it is on the same stream as a text.
#[test]
fn json_log_has_an_object_a_line_and_the_last_error() {
    let (_folder, log) = file();
    let cases = [(None, ""), (Some(log.to_str().unwrap()), "foreshore: ")];
    for (file, printed) in cases {
        let mut command = Command::new(env!("CARGO_BIN_EXE_foreshore"));
        command.args(["--kernel", "/nonexistent", "-v", "--log-format", "json"]);
        command.args(file.iter().flat_map(|file| ["--log-file", file]));
        let output = command.output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.starts_with(printed), "{error}");
        let text = file.map_or(error, |file| fs::read_to_string(file).unwrap());
        let objects = text.lines().filter(|line| *line != EARLIER.trim_end()).map(|line| {
            serde_json::from_str::<serde_json::Value>(line)
                .unwrap_or_else(|error| panic!("{error}: {line}"))
        });
        let objects: Vec<_> = objects.collect();
        let last = objects.last().unwrap();
        assert_eq!(last["level"], "ERROR", "{last}");
        assert_eq!(last["message"], "The VMM ends because of an error", "{last}");
        assert!(last["error"].as_str().unwrap().starts_with("cannot boot the VM: "), "{last}");
        assert!(objects.len() > 3, "{text}");
    }
}

#[test]
fn file_of_a_stream_is_refused_for_another_output() {
    let (_folder, path) = file();
    let name = path.display().to_string();
    let [console, events] = [format!("file={name}"), format!("path={name}")];
    for arguments in [
        ["--log-file", "/dev/stderr", "--serial", "file=/dev/stdout"],
        ["--log-file", "/dev/stderr", "--serial", &console],
        ["--log-file", "/dev/stderr", "--event-monitor", &events],
        ["--log-file", &name, "--event-monitor", "path=/dev/stdout"],
    ] {
        let status = run(&arguments, [append(&path), append(&path)]).status;
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(status.code(), Some(2), "{arguments:?}: {text}");
        assert!(text.ends_with("can share one\n"), "{text}");
    }
}
