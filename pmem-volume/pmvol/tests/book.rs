//! Runs the commands of the book that need no guest, no device and no network.

use std::path::Path;

use foreshore_cli::book::script::{PageScripts, run, scripts};

const PMVOL: &str = env!("CARGO_BIN_EXE_pmvol");

/// Paths of the book, and their paths below the temporary directory.
const PATHS: [(&str, &str); 4] = [
    ("/dev/shm/pool", "pool"),
    ("/run/vm.sock", "vm.sock"),
    ("/pm/pool", "pm-pool"),
    ("/usr/share/bash-completion/completions", ""),
];

/// Pools and volumes that a block needs: page, start of a command, and the script before its block.
const PREPARATION: [(&str, &str, &str); 4] = [
    (
        "docs/how-to/recover.md",
        "pmvol volume export",
        "pmvol create POOL --size 256M
        pmvol create NEWPOOL --size 256M
        pmvol volume create POOL NAME --size 64M",
    ),
    ("docs/how-to/upgrade.md", "pmvol check", "pmvol create POOL --size 256M"),
    (
        "docs/reference/volumes.md",
        "pmvol volume export",
        "pmvol volume create /pm/pool data --size 64M",
    ),
    ("docs/tutorials/pm-setup.md", "pmvol info", "pmvol create /pm/pool --size 256M"),
];

fn run_page(page: &PageScripts) {
    // In the folder of the book's trials, a pool takes only memory for chunks in use.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    for script in &page.scripts {
        for (of_page, command, preparation) in PREPARATION {
            if page.page == Path::new(of_page) && script.contains(command) {
                run(preparation, Path::new(PMVOL), folder.path(), &PATHS);
            }
        }
        run(script, Path::new(PMVOL), folder.path(), &PATHS);
    }
}

#[test]
fn commands_of_the_book_succeed() {
    let pages = scripts("pmvol");
    assert!(pages.len() > 5);
    for page in &pages {
        println!("{}: {:#?}", page.page.display(), page.scripts);
        run_page(page);
    }
}
