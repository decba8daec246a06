//! Tests of images through pipes, and of volumes that are created from images.

#[path = "shell/overwrite.rs"]
mod overwrite;
mod shell;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::process::{Command, Output, Stdio};

use overwrite::overwrite;
use pmem_volume::{OpenMode, Pool};
use serde_json::Value;
use shell::Folder;

const MIB: u64 = 1 << 20;
const SECTOR_BYTES: u64 = 4096;
const QCOW2: &str = "qcow2 cannot be streamed";

fn pmvol(folder: &Folder, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pmvol"));
    command.args(arguments).current_dir(folder.0.path());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a command with `bytes` on its stdin.
fn feed(folder: &Folder, arguments: &[&str], bytes: &[u8]) -> Output {
    let mut child = pmvol(folder, arguments).stdin(Stdio::piped()).spawn().unwrap();
    // A command that refuses to start reads no input.
    let _ = child.stdin.take().unwrap().write_all(bytes);
    child.wait_with_output().unwrap()
}

fn refused(output: &Output, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    words.iter().for_each(|word| assert!(text.contains(word), "{text}"));
}

fn names(folder: &Folder) -> Vec<String> {
    let document = folder.json(&["volume", "list", "pool", "--json"]);
    let volumes = document["volumes"].as_array().unwrap().iter();
    volumes.map(|volume| volume["name"].as_str().unwrap().to_owned()).collect()
}

/// Creates a pool with an empty BTT volume `v`, an empty raw volume `r`, and an image with data in
/// a few places.
fn with_image() -> (Folder, Vec<u8>) {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "96M"]);
    folder.succeed(&["volume", "create", "pool", "v", "--size", "24M", "--thick"]);
    folder.succeed(&["volume", "create", "pool", "r", "--size", "8M", "--format", "raw"]);
    let file = File::create(folder.path("in")).unwrap();
    file.set_len(7 * MIB + 100).unwrap();
    for sector in [0, 3, 4, 700, 7 * MIB / SECTOR_BYTES - 1] {
        let mut bytes = vec![0x5a; SECTOR_BYTES as usize];
        bytes[..8].copy_from_slice(&sector.to_le_bytes());
        file.write_all_at(&bytes, sector * SECTOR_BYTES).unwrap();
    }
    file.write_all_at(b"the last bytes", 7 * MIB + 86).unwrap();
    let image = fs::read(folder.path("in")).unwrap();
    (folder, image)
}

fn usable(folder: &Folder, name: &str) -> usize {
    let document = folder.json(&["volume", "list", "pool", "--json"]);
    let mut volumes = document["volumes"].as_array().unwrap().iter();
    let volume = volumes.find(|volume| volume["name"] == name).unwrap();
    volume["usable_bytes"].as_u64().unwrap() as usize
}

#[test]
fn images_through_pipes_equal_images_through_files() {
    let (folder, image) = with_image();
    for name in ["v", "r"] {
        let output = feed(&folder, &["volume", "import", "pool", name, "--from", "-"], &image);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let words = format!("stdin imported to volume {name} of pool: 7.0 MiB, of which 24 KiB");
        assert!(text.starts_with(&words), "{text}");
        let output =
            pmvol(&folder, &["volume", "export", "pool", name, "--to", "-"]).output().unwrap();
        assert!(output.status.success());
        let mut expected = image.clone();
        expected.resize(usable(&folder, name), 0);
        assert!(output.stdout == expected, "{name}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains("exported to stdout") && text.lines().count() == 1, "{text}");
        // Uses a file name instead of a pipe, and the other name of the command.
        folder.succeed(&["volume", "export", "pool", name, "--to", "out", "--force"]);
        assert!(fs::read(folder.path("out")).unwrap() == expected);
        folder.succeed(&["btt", "export", "pool", name, "--to", "out", "--force"]);
        assert!(fs::read(folder.path("out")).unwrap() == expected);
        let again = ["volume", "import", "pool", name, "--from", "in"];
        folder.fail(&again, &["holds data", "--force"]);
    }
    assert!(folder.succeed(&["check", "pool"]).ends_with("clean\n"));
}

#[test]
fn import_from_stream_with_force_replaces_the_whole_volume() {
    let (folder, image) = with_image();
    let full = vec![0x77; usable(&folder, "v")];
    assert!(
        feed(&folder, &["volume", "import", "pool", "v", "--from", "-"], &full).status.success()
    );
    let import = ["volume", "import", "pool", "v", "--from", "-"];
    refused(&feed(&folder, &import, &image), &["holds data", "--force"]);
    assert!(feed(&folder, &[&import[..], &["--force"]].concat(), &image).status.success());
    folder.succeed(&["volume", "export", "pool", "v", "--to", "out"]);
    let mut expected = image;
    expected.resize(full.len(), 0);
    assert!(fs::read(folder.path("out")).unwrap() == expected);
}

#[test]
fn impossible_streams_are_refused_with_a_reason() {
    let (folder, _) = with_image();
    let export = ["volume", "export", "pool", "v", "--to", "-"];
    let import = ["volume", "import", "pool", "v", "--from", "-"];
    folder.fail(&[&export[..], &["--format", "qcow2"]].concat(), &[QCOW2]);
    folder.fail(&[&export[..], &["--json"]].concat(), &["--json", "stdout"]);
    refused(&feed(&folder, &import, b""), &["stdin has no data"]);
    refused(&feed(&folder, &import, b"QFI\xfb and more"), &["begins like a qcow2 image"]);
    assert!(
        feed(&folder, &[&import[..], &["--format", "raw"]].concat(), b"QFI\xfb").status.success()
    );
    let large = vec![1; usable(&folder, "v") + 1];
    refused(
        &feed(&folder, &[&import[..], &["--force"]].concat(), &large),
        &["has room for", "import it again with --force"],
    );
}

#[test]
fn export_to_a_closed_pipe_fails() {
    let (folder, _) = with_image();
    let mut child =
        pmvol(&folder, &["volume", "export", "pool", "v", "--to", "-"]).spawn().unwrap();
    // The remaining output is larger than the buffer of a pipe.
    let mut first = [0; 4096];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let output = child.wait_with_output().unwrap();
    refused(&output, &["the reader closed stdout before the end of the image"]);
}

#[test]
fn volume_is_created_from_an_image() {
    let (folder, image) = with_image();
    let create = ["volume", "create", "pool", "new", "--from"];
    let text = folder.succeed(&[&create[..], &["in"]].concat());
    assert!(text.starts_with("volume new created: 18 MiB, btt, "), "{text}");
    let document = folder.run(&[&create[..], &["in", "--json"]].concat());
    refused(&document, &["\"new\" already exists"]);
    folder.succeed(&["volume", "export", "pool", "new", "--to", "out"]);
    let mut expected = image.clone();
    expected.resize(usable(&folder, "new"), 0);
    assert!(fs::read(folder.path("out")).unwrap() == expected);

    folder.succeed(&["volume", "delete", "pool", "new", "--force"]);
    let made = folder.json(&[&create[..], &["in", "--format", "raw", "--json"]].concat());
    assert_eq!(
        (&made["volumes"][0]["size_bytes"], &made["image_bytes"]),
        (&(8 * MIB).into(), &image.len().into())
    );
    // An explicit size takes precedence.
    folder.succeed(&["volume", "delete", "pool", "new", "--force"]);
    let output = feed(&folder, &[&create[..], &["-", "--size", "20M"]].concat(), &image);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(names(&folder), ["new", "r", "v"]);
    assert!(folder.succeed(&["check", "pool"]).ends_with("clean\n"));
    folder.fail(&["volume", "create", "pool", "w"], &["--size"]);
    folder.fail(
        &["volume", "create", "pool", "w", "--size", "20M", "--image-format", "raw"],
        &["--from"],
    );
}

#[test]
fn failed_import_during_creation_leaves_no_volume() {
    let (folder, image) = with_image();
    let info = || folder.json(&["info", "pool", "--json"]);
    let before = info();
    let create = ["volume", "create", "pool", "new", "--from"];
    for (arguments, words) in [
        (&["in", "--size", "2M", "--format", "raw"][..], "has room for 2097152"),
        (&["-", "--size", "2M", "--format", "raw"], "has room for"),
        (&["nothing"], "cannot read nothing"),
        (&["in", "--size", "1G"], "the pool is full"),
    ] {
        refused(&feed(&folder, &[&create[..], arguments].concat(), &image), &[words]);
        assert_eq!(names(&folder), ["r", "v"], "{arguments:?}");
        assert_eq!(info(), before, "{arguments:?}");
    }
}

#[test]
fn killed_creation_leaves_a_partial_volume_that_can_be_deleted() {
    let (folder, image) = with_image();
    let arguments = ["volume", "create", "pool", "new", "--size", "20M", "--from", "-"];
    let mut child = pmvol(&folder, &arguments).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.as_mut().unwrap().write_all(&image[..4]).unwrap();
    // The volume exists, and its import waits for more input.
    let peek = || Pool::open(&folder.path("pool"), OpenMode::Peek).unwrap().volumes();
    while !peek().iter().any(|volume| volume.name == "new.importing") {
        assert!(child.try_wait().unwrap().is_none());
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(names(&folder), ["new.importing", "r", "v"]);
    assert!(folder.succeed(&["check", "pool"]).ends_with("clean\n"));
    let output = feed(&folder, &arguments, &image);
    let remedy = "pmvol volume delete pool new.importing --force";
    refused(&output, &[remedy]);
    folder.succeed(&remedy.split(' ').skip(1).collect::<Vec<_>>());
    assert!(feed(&folder, &arguments, &image).status.success());
    assert_eq!(names(&folder), ["new", "r", "v"]);
}

#[test]
fn transfers_are_reported_in_json() {
    let (folder, image) = with_image();
    let filled = folder.json(&["volume", "import", "pool", "v", "--from", "in", "--json"]);
    let expected = |document: &Value| {
        assert_eq!((&document["path"], &document["volume"]), (&"pool".into(), &"v".into()));
    };
    expected(&filled);
    assert_eq!((&filled["image"], &filled["image_bytes"]), (&"in".into(), &image.len().into()));
    let out = folder.json(&["volume", "export", "pool", "v", "--to", "out", "--json"]);
    expected(&out);
    assert_eq!((&out["complete"], &out["lost_sectors"]), (&true.into(), &0.into()));
    assert_eq!(out["size_bytes"], usable(&folder, "v"));
    // Marks sector 3 as lost in its map entry.
    let info = folder.json(&["btt", "info", "pool", "v", "--json"]);
    let map_at = 4 * MIB + info["arenas"][0]["map_at_bytes"].as_u64().unwrap();
    overwrite(&folder.path("pool"), map_at + 4 * 3, &(3u32 | 1 << 30).to_le_bytes());
    let arguments = ["volume", "export", "pool", "v", "--to", "out", "--force", "--json"];
    let output = folder.run(&arguments);
    assert_eq!(output.status.code(), Some(1));
    let out: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&out["complete"], &out["lost_sectors"]), (&false.into(), &1.into()));
}

/// The import of an empty BTT fills windows of 64 MiB. Each window becomes visible when it is
/// complete.
#[test]
fn sectors_are_zeros_or_new_after_a_killed_import_into_an_empty_volume() {
    const IMAGE_BYTES: u64 = 160 * MIB;
    // Offset of the first sector's block, after the pool's metadata and the info block.
    const BLOCKS_AT: u64 = 4 * MIB + 8192;
    let folder = Folder::new();
    let sectors = 0..IMAGE_BYTES / SECTOR_BYTES;
    let content = |sector: u64| {
        let mut bytes = vec![0x5a; SECTOR_BYTES as usize];
        bytes[..8].copy_from_slice(&sector.to_le_bytes());
        bytes
    };
    fs::write(folder.path("in"), sectors.clone().flat_map(content).collect::<Vec<_>>()).unwrap();
    let mut mixed = 0;
    for round in 0.. {
        assert!(round < 100, "no import was killed in between: {mixed}");
        let _ = fs::remove_file(folder.path("pool"));
        folder.succeed(&["create", "pool", "--size", "256M"]);
        folder.succeed(&["volume", "create", "pool", "v", "--size", "200M"]);
        let pool = File::open(folder.path("pool")).unwrap();
        let mut child =
            pmvol(&folder, &["volume", "import", "pool", "v", "--from", "in"]).spawn().unwrap();
        // Killed as soon as it has stored a sector of the second or third window.
        let with_meter = BLOCKS_AT + (65 + round * 7 % 90) * MIB + 100;
        while child.try_wait().unwrap().is_none() {
            let mut byte = [0];
            pool.read_exact_at(&mut byte, with_meter).unwrap();
            if byte[0] != 0 {
                child.kill().unwrap();
                break;
            }
        }
        child.wait().unwrap();
        assert_eq!(folder.json(&["btt", "check", "pool", "v", "--json"])["clean"], true);
        let output = pmvol(&folder, &["volume", "export", "pool", "v", "--to", "-"]).output();
        let image = output.unwrap().stdout;
        let mut fresh = 0;
        for (sector, bytes) in sectors.clone().zip(image.chunks(SECTOR_BYTES as usize)) {
            let is_new = bytes == content(sector);
            assert!(is_new || bytes.iter().all(|byte| *byte == 0), "sector {sector} is torn");
            fresh += u64::from(is_new);
        }
        mixed += u32::from((1..sectors.end).contains(&fresh));
        if mixed == 3 {
            break;
        }
    }
}
