//! Temporary folder in which tests run `pmvol`.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

pub(crate) struct Folder(pub tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::TempDir::new_in("/dev/shm").unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_pmvol"))
            .args(arguments)
            .current_dir(self.0.path())
            .output()
            .unwrap()
    }

    pub(crate) fn succeed(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(
            output.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a command that should fail with a single line that contains all of `words`. The exit
    /// code should be 1, or 2 if the command line is wrong or a check cannot read the pool.
    pub(crate) fn fail(&self, arguments: &[&str], words: &[&str]) {
        let output = self.run(arguments);
        let text = String::from_utf8(output.stderr).unwrap();
        let command = if arguments[0] == "btt" { arguments[1] } else { arguments[0] };
        let cannot = text.contains("try '--help'") || ["check", "repair"].contains(&command);
        assert_eq!(output.status.code(), Some(if cannot { 2 } else { 1 }), "{arguments:?}: {text}");
        assert!(text.starts_with("pmvol: "), "{arguments:?}: {text}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        for word in words {
            assert!(text.contains(word), "{arguments:?}: {text:?} does not say {word:?}");
        }
    }

    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        let document: Value = serde_json::from_str(&self.succeed(arguments)).unwrap();
        assert_eq!(document["schema"], 1, "{arguments:?}");
        document
    }
}
