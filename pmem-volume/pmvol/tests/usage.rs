//! Tests that exit codes separate wrong command lines from refusals of a pool, volume or file.

#[expect(dead_code, reason = "each program of tests uses a part of it")]
mod shell;

use std::process::Output;

use shell::Folder;

/// Command lines that no pool, volume or image could make right.
const WRONG: &[(&str, &str)] = &[
    ("create new --size 3M", "--size: pool size 3145728 (3 MiB) is not a multiple of 2 MiB"),
    ("create new --size 4M", "--size: pool size 4194304 (4 MiB) is not between 8 MiB and 64 TiB"),
    ("create new --size 1Q", "\"1Q\" is not a size"),
    ("create new --size 64M --reserve 1M", "--reserve: reserve 1048576"),
    ("create new --size 64M --reserve 64M", "--reserve: reserve 67108864 (64 MiB) exceeds"),
    ("create /dev/dax9.9 --reserve 3M", "--reserve: reserve 3145728"),
    ("grow pool --size 65M", "--size: pool size 68157440 (65 MiB) is not a multiple of 2 MiB"),
    ("grow pool --size 1000T", "--size: pool size 1099511627776000"),
    ("repair pool --give-up-volume a/b", "volume name \"a/b\" contains '/'"),
    ("volume create pool w --size 0", "--size: volume size 0 (0) is not a positive multiple"),
    ("volume create pool w --size 3M", "--size: volume size 3145728"),
    ("volume create pool w --size 16M", "--size: "),
    ("volume create pool w --size 3M --format raw", "--size: volume size 3145728"),
    ("volume create pool w --from -", "--size: the size of stdin is unknown"),
    ("volume create pool .w --size 20M", "volume name \".w\" must not start with '.'"),
    (
        "volume create pool w --size 20M --from - --image-format qcow2",
        "--from -: qcow2 cannot be streamed, because its reader and its writer seek; use a file, or leave --image-format out",
    ),
    ("volume create pool w --size 20M --thick --reserve 2M", "cannot be used with"),
    ("volume create pool w --size 20M --thick --thin", "cannot be used with"),
    ("volume create pool w --size 2M --format raw --reserve 2M", "--reserve: a raw volume cannot"),
    ("volume create pool w --size 20M --reserve 3M", "--reserve: reserve 3145728"),
    (
        "volume create pool w --size 20M --reserve 22M",
        "--reserve: reserve 23068672 (22 MiB) exceeds the size of the volume, 20 MiB",
    ),
    ("volume resize pool v --size 20M --reserve 2M", "cannot be used with"),
    ("volume resize pool v --reserve 1M", "--reserve: reserve 1048576"),
    ("volume resize pool v", "--size <SIZE>"),
    ("volume resize pool v --size 21M", "--size: volume size 22020096"),
    ("volume rename pool v v", "\"v\" is both the old and the new name"),
    ("volume rename pool v b,c", "volume name \"b,c\" contains ','"),
    ("volume delete pool b,c", "volume name \"b,c\" contains ','"),
    ("volume split pool v --into a=20M", "--into: a split needs at least 2 parts, not 1"),
    ("volume split pool v --into a=20M --into a=rest", "--into: two parts have the name \"a\""),
    ("volume split pool v --into a=rest --into b=rest", "--into: only one part can have the rest"),
    ("volume split pool v --into a=3M --into b=rest", "--into: part \"a\": volume size 3145728"),
    ("volume split pool v --into a/b=2M --into b=rest", "volume name \"a/b\" contains '/'"),
    ("volume export pool v --to - --json", "--to -: --json prints on stdout"),
    ("volume export pool v --to - --format qcow2", "--to -: qcow2 cannot be streamed"),
    ("btt export pool v --to - --json", "--to -: --json prints on stdout"),
    ("volume import pool v --from - --format qcow2", "--from -: qcow2 cannot be streamed"),
    ("btt import pool v --from - --format qcow2", "--from -: qcow2 cannot be streamed"),
    ("btt read pool v --sector -1", "unexpected argument '-1'"),
    ("volume list pool --jsno", "similar argument exists: '--json'"),
];

/// Valid command lines that the pool, the volume or the file system refuses.
const REFUSED: &[(&str, &str)] = &[
    ("create new", "a size is required"),
    ("create nowhere/new --size 64M", "folder nowhere does not exist"),
    ("create /dev/mistyped --reserve 4M", "no such device"),
    ("grow pool --size 32M", "cannot shrink"),
    ("volume create pool w --size 62M", "the pool is full"),
    ("volume create pool v --size 20M", "already exists"),
    ("volume resize pool v --size 2M", "a BTT cannot shrink"),
    ("volume resize pool v --reserve 2M", "\"v\" is thick, so all of it is guaranteed"),
    ("volume rename pool w x", "no such volume"),
    ("volume split pool v --into a=20M --into b=20M", "but the volume has"),
    ("volume split pool v --into a=2M --into b=rest", "part \"a\""),
    ("volume import pool v --from nothing", "nothing"),
    ("btt read pool v --sector 999999", "not in the volume"),
];

fn run(folder: &Folder, line: &str) -> (Output, String) {
    let output = folder.run(&line.split(' ').collect::<Vec<_>>());
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(text.starts_with("pmvol: ") && output.stdout.is_empty(), "{line}: {text}");
    (output, text)
}

#[test]
fn wrong_command_line_exits_with_2_and_refusal_with_1() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "64M"]);
    folder.succeed(&["volume", "create", "pool", "v", "--size", "22M", "--thick"]);
    let before = std::fs::read(folder.path("pool")).unwrap();
    for (line, message) in WRONG {
        let (output, text) = run(&folder, line);
        assert_eq!(output.status.code(), Some(2), "{line}: {text}");
        assert!(text.contains(message), "{line}: {text}");
        assert!(text.ends_with("For more information, try '--help'.\n"), "{line}: {text}");
    }
    for (line, message) in REFUSED {
        let (output, text) = run(&folder, line);
        assert_eq!(output.status.code(), Some(1), "{line}: {text}");
        assert!(text.contains(message) && !text.contains("--help"), "{line}: {text}");
    }
    assert!(before == std::fs::read(folder.path("pool")).unwrap());
    assert_eq!(std::fs::read_dir(folder.0.path()).unwrap().count(), 1);
}

#[test]
fn wrong_value_shows_the_usage_of_its_command() {
    let folder = Folder::new();
    let (_, text) = run(&folder, "volume create pool w --size 3M");
    assert!(text.contains("\n\nUsage: pmvol volume create [OPTIONS] "), "{text}");
}

#[test]
fn comments_of_examples_are_aligned() {
    let folder = Folder::new();
    for command in ["", "create", "repair", "volume create", "volume resize", "btt check"] {
        let line = format!("{command} --help");
        let help = folder.succeed(&line.trim().split(' ').collect::<Vec<_>>());
        let examples = help.split_once("Examples:\n").unwrap().1;
        let lines = examples.lines().map_while(|line| line.strip_prefix("  pmvol "));
        let columns = lines.filter_map(|line| {
            let (example, comment) = line.split_once("  ")?;
            Some(example.len() + comment.len() - comment.trim_start().len())
        });
        let columns: std::collections::BTreeSet<_> = columns.collect();
        assert!(columns.len() <= 1, "{command}: {columns:?}");
    }
}
