//! Runs the commands of the book.

use std::fs;
use std::path::Path;

use foreshore_cli::book::script::{run, scripts};

const SIMULATOR: &str = env!("CARGO_BIN_EXE_foreshore-sim");

/// Trace that the commands of the book replay.
const TRACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/recorded-load.jsonl");

/// Paths of the book, and their paths below the temporary directory.
const PATHS: [(&str, &str); 2] =
    [("/var/tmp/trace.jsonl", "trace.jsonl"), ("/usr/share/bash-completion/completions", "")];

#[test]
fn commands_of_the_book_succeed() {
    let pages = scripts("foreshore-sim");
    assert!(pages.len() > 2);
    for page in &pages {
        println!("{}: {:#?}", page.page.display(), page.scripts);
        let folder = tempfile::tempdir().unwrap();
        fs::copy(TRACE, folder.path().join("trace.jsonl")).unwrap();
        for script in &page.scripts {
            run(script, Path::new(SIMULATOR), folder.path(), &PATHS);
        }
    }
}
