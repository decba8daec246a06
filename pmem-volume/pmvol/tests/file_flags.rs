//! Tests for the `pmvol` rows of the table in docs/reference/consoles.md about files that flags
//! name. vmm/tests/file_flags.rs tests the rows of the VMM.

#[expect(dead_code, reason = "each program of tests uses a part of it")]
mod shell;

use std::fs;
use std::os::unix::fs::FileExt;

use pmem_volume::Pool;
use shell::Folder;

const PAGE: &str = include_str!("../../../docs/reference/consoles.md");
const MIB: u64 = 1 << 20;

/// Contents of a file: description, offset of the bytes, and the bytes.
const CONTENTS: &[(&str, u64, &[u8])] = &[
    ("an XFS file system", 0, b"XFSB"),
    ("an ext4 file system", 0x438, b"\x53\xef"),
    ("a BTT", 0x1000, b"BTT_ARENA_INFO\0\0"),
    ("a GPT partition table", 0x200, b"EFI PART"),
    ("a partition table or boot sector", 0x1fe, b"\x55\xaa"),
    ("a qcow2 image", 0, b"QFI\xfb"),
    ("text", 0, b"an earlier log\n"),
    ("nothing", 0, b""),
];

#[test]
fn page_rows_of_pmvol_match_these_tests() {
    let rows: Vec<_> = PAGE.lines().filter(|line| line.starts_with("| `pmvol ")).collect();
    assert_eq!(
        rows,
        [
            "| `pmvol create` | never replaced; a device with `--force` | any file; devices with data, and pools with volumes even with `--force` |",
            "| `pmvol btt export --to` | replaced with `--force` | without `--force`; pools always |",
        ]
    );
}

fn with_file(folder: &Folder, offset: u64, bytes: &[u8]) -> Vec<u8> {
    let path = folder.path("file");
    let file = fs::File::create(&path).unwrap();
    file.set_len(if bytes.is_empty() { 0 } else { MIB }).unwrap();
    file.write_all_at(bytes, offset).unwrap();
    fs::read(path).unwrap()
}

#[test]
fn create_never_replaces_a_file() {
    let folder = Folder::new();
    let refuse = |before: &[u8], content: &str| {
        for force in [&["--force"][..], &[]] {
            let arguments = [&["create", "file", "--size", "16M"], force].concat();
            let output = folder.run(&arguments);
            assert!(!output.status.success(), "{content} {force:?}");
            assert!(
                String::from_utf8_lossy(&output.stderr).contains("file"),
                "{content} {force:?}"
            );
            assert!(fs::read(folder.path("file")).unwrap() == before, "{content} {force:?}");
        }
    };
    for (content, offset, bytes) in CONTENTS {
        refuse(&with_file(&folder, *offset, bytes), content);
    }
    fs::remove_file(folder.path("file")).unwrap();
    drop(Pool::create(&folder.path("file"), 16 * MIB, 0).unwrap());
    refuse(&fs::read(folder.path("file")).unwrap(), "a pool");
}

#[test]
fn export_replaces_a_file_only_with_force_and_never_a_pool() {
    let folder = Folder::new();
    folder.succeed(&["create", "source", "--size", "32M"]);
    folder.succeed(&["volume", "create", "source", "v", "--size", "18M"]);
    let export = ["btt", "export", "source", "v", "--to", "file"];
    let by_force = [&export[..], &["--force"]].concat();
    for (content, offset, bytes) in CONTENTS {
        let before = with_file(&folder, *offset, bytes);
        folder.fail(&export, &["file", "exists already", "--force"]);
        assert!(fs::read(folder.path("file")).unwrap() == before, "{content}");
        folder.succeed(&by_force);
        assert!(fs::read(folder.path("file")).unwrap().len() > MIB as usize, "{content}");
    }
    for is_marked in [true, false] {
        fs::remove_file(folder.path("file")).unwrap();
        drop(Pool::create(&folder.path("file"), 16 * MIB, 0).unwrap());
        if !is_marked {
            // The copy has no extended attributes.
            fs::rename(folder.path("file"), folder.path("original")).unwrap();
            fs::copy(folder.path("original"), folder.path("file")).unwrap();
        }
        let before = fs::read(folder.path("file")).unwrap();
        for arguments in [&export[..], &by_force] {
            assert!(!folder.run(arguments).status.success());
            assert!(fs::read(folder.path("file")).unwrap() == before);
        }
    }
}
