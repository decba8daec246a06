//! Tests of the `pmvol btt` commands.

#[path = "shell/overwrite.rs"]
mod overwrite;
mod shell;

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

use overwrite::overwrite;
use pmem_volume::btt::{Engine, Layout};
use pmem_volume::btt_file::BttFile;
use pmem_volume::media::MemoryMedia;
use pmem_volume::{OpenMode, Pool};
use serde_json::Value;
use shell::Folder;

const MIB: u64 = 1 << 20;
const SECTOR_BYTES: usize = 4096;
/// Offsets of the first volume in a pool, and of the volume's first arena.
const VOLUME_AT: u64 = 4 * MIB;
const INFO_AT: u64 = VOLUME_AT + 4096;

/// Creates a pool with a BTT volume `v`, whose chunks are contiguous.
fn with_volume() -> Folder {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "96M"]);
    folder.succeed(&["volume", "create", "pool", "v", "--size", "24M", "--thick"]);
    folder
}

/// Creates an image with different data in each of `sectors`.
fn image(path: &Path, len_bytes: u64, sectors: impl Iterator<Item = u64>, byte: u8) {
    let file = File::create(path).unwrap();
    file.set_len(len_bytes).unwrap();
    for sector in sectors {
        let mut bytes = vec![byte; SECTOR_BYTES];
        bytes[..8].copy_from_slice(&sector.to_le_bytes());
        file.write_all_at(&bytes, sector * SECTOR_BYTES as u64).unwrap();
    }
}

fn sectors(folder: &Folder) -> u64 {
    folder.json(&["btt", "info", "pool", "v", "--json"])["sectors"].as_u64().unwrap()
}

/// Returns an image padded with zeros to the length of the volume, like an export of the volume.
fn as_long_as_the_volume(folder: &Folder, image: &str) -> Vec<u8> {
    let mut bytes = fs::read(folder.path(image)).unwrap();
    bytes.resize(sectors(folder) as usize * SECTOR_BYTES, 0);
    bytes
}

fn write(folder: &Folder, sector: &str, bytes: &[u8]) -> std::process::Output {
    let arguments = ["btt", "write", "pool", "v", "--sector", sector];
    let mut command = Command::new(env!("CARGO_BIN_EXE_pmvol"));
    let command = command.args(arguments).current_dir(folder.0.path());
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that refuses its arguments reads no input.
    let _ = child.stdin.take().unwrap().write_all(bytes);
    child.wait_with_output().unwrap()
}

#[test]
fn sectors_are_written_and_read() {
    let folder = with_volume();
    let info = folder.json(&["btt", "info", "pool", "v", "--json"]);
    assert_eq!((&info["sector_bytes"], &info["arenas"][0]["lanes"]), (&4096.into(), &256.into()));
    assert_eq!(info["arenas"][0]["info_blocks"], "both");
    assert_eq!(info["missing"], Value::Null);
    let text = folder.succeed(&["btt", "info", "pool", "v"]);
    assert!(
        text.contains("volume v of pool: 24 MiB, BTT version 1.1")
            && text.contains("writes     yes")
    );

    let last = sectors(&folder) - 1;
    let bytes: Vec<u8> = (0..3 * SECTOR_BYTES).map(|at| (at / 100) as u8).collect();
    assert!(write(&folder, "7", &bytes).status.success());
    let read = folder.run(&["btt", "read", "pool", "v", "--sector", "7", "--count", "3"]);
    assert!(read.status.success() && read.stdout == bytes);
    let read = folder.run(&["btt", "read", "pool", "v", "--sector", &last.to_string()]);
    assert!(read.stdout == [0; SECTOR_BYTES]);
    let hex = folder.succeed(&["btt", "read", "pool", "v", "--sector", "7", "--hex"]);
    assert!(hex.starts_with("00007000  00 00 00") && hex.ends_with("\n00008000\n"), "{hex}");
    let text = folder.succeed(&["btt", "check", "pool", "v"]);
    assert!(
        text.starts_with("clean: ") && text.ends_with("each block referenced once\n"),
        "{text}"
    );
    assert_eq!(folder.json(&["btt", "check", "pool", "v", "--json"])["clean"], true);
    assert!(folder.succeed(&["check", "pool"]).ends_with("clean\n"));

    // Writes from a file. An incomplete last sector is reported, and the sectors before it are
    // written.
    fs::write(folder.path("one"), vec![9; SECTOR_BYTES]).unwrap();
    folder.succeed(&["btt", "write", "pool", "v", "--sector", "9", "--from", "one"]);
    let output = write(&folder, "11", &vec![5; SECTOR_BYTES + 7]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(
        text.contains(
            "1 sector(s) were written, 11 to 11: the last 7 bytes are less than a sector"
        ),
        "{text}"
    );
    let read = folder.run(&["btt", "read", "pool", "v", "--sector", "9", "--count", "3"]);
    assert!(read.stdout == [[9; SECTOR_BYTES], [0; SECTOR_BYTES], [5; SECTOR_BYTES]].concat());

    // A file that is not a multiple of the sector size is refused completely. Empty input is an
    // error.
    fs::write(folder.path("more"), vec![7; SECTOR_BYTES + 7]).unwrap();
    let more = ["btt", "write", "pool", "v", "--sector", "9", "--from", "more"];
    folder.fail(
        &more,
        &["4103 bytes are not a multiple of the sector size, 4096", "nothing was written"],
    );
    for (bytes, words) in [
        (&[][..], "there is no data to write"),
        (&[1; 3], "the last 3 bytes are less than a sector"),
    ] {
        let output = write(&folder, "9", bytes);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success()
                && text.contains("nothing was written")
                && text.contains(words),
            "{text}"
        );
    }
    let read = folder.run(&["btt", "read", "pool", "v", "--sector", "9", "--count", "1"]);
    assert!(read.stdout == [9; SECTOR_BYTES]);

    let end = (last + 1).to_string();
    folder.fail(&["btt", "read", "pool", "v", "--sector", &end], &[&end, "not in the volume"]);
    let text = String::from_utf8(write(&folder, &end, &[0; SECTOR_BYTES]).stderr).unwrap();
    assert!(text.contains(&format!("sectors {end} to {end} are outside the volume")), "{text}");
}

#[test]
fn imported_image_is_exported_unchanged_and_sparse() {
    let folder = with_volume();
    image(&folder.path("in"), 20 * MIB, (0..500).step_by(7).chain([4000]), 0x11);
    let text = folder.succeed(&["btt", "import", "pool", "v", "--from", "in"]);
    assert!(
        text.contains("in imported to volume v of pool: 20 MiB, of which 292 KiB are data"),
        "{text}"
    );
    folder.succeed(&["btt", "export", "pool", "v", "--to", "out"]);
    assert!(fs::read(folder.path("out")).unwrap() == as_long_as_the_volume(&folder, "in"));
    let blocks = fs::metadata(folder.path("out")).unwrap().blocks() * 512;
    assert!(blocks <= MIB, "{blocks} bytes of the image are no holes");
    folder.fail(
        &["btt", "export", "pool", "v", "--to", "out"],
        &["out", "exists already", "--force"],
    );
    folder.succeed(&["btt", "export", "pool", "v", "--to", "out", "--force"]);
    folder.fail(&["btt", "export", "pool", "v", "--to", "."], &["not a regular file"]);
    // Even with --force, a pool is not replaced, because it may be the only copy.
    let pool = fs::read(folder.path("pool")).unwrap();
    fs::write(folder.path("other"), &pool).unwrap();
    folder.fail(
        &["btt", "export", "pool", "v", "--to", "pool", "--force"],
        &["it is the source of the export"],
    );
    folder.fail(&["btt", "export", "pool", "v", "--to", "other", "--force"], &["it is a pool"]);
    assert!(
        fs::read(folder.path("pool")).unwrap() == pool
            && fs::read(folder.path("other")).unwrap() == pool
    );

    // Another image replaces all of the volume, including sectors in its holes and past its end,
    // but only with --force.
    image(&folder.path("other"), 6 * MIB + 100, (1000..1030).chain([3]), 0x22);
    folder.fail(&["btt", "import", "pool", "v", "--from", "other"], &["holds data", "--force"]);
    folder.succeed(&["btt", "import", "pool", "v", "--from", "other", "--force"]);
    folder.succeed(&["btt", "export", "pool", "v", "--to", "out", "--force"]);
    assert!(fs::read(folder.path("out")).unwrap() == as_long_as_the_volume(&folder, "other"));
    assert!(folder.succeed(&["btt", "check", "pool", "v"]).starts_with("clean"));

    image(&folder.path("large"), 30 * MIB, [0].into_iter(), 1);
    let words = ["31457280 bytes (30 MiB)", "volume v of pool", "has room for"];
    folder.fail(&["btt", "import", "pool", "v", "--from", "large", "--force"], &words);
    folder.fail(&["btt", "import", "pool", "v", "--from", "nothing"], &["nothing"]);
    folder.fail(&["btt", "import", "pool", "v", "--from", "."], &["not a regular file"]);
}

#[test]
fn raw_volumes_are_exported_and_imported() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "64M"]);
    folder.succeed(&["volume", "create", "pool", "v", "--size", "8M", "--format", "raw"]);
    image(&folder.path("in"), 8 * MIB, (0..2048).step_by(3), 0x33);
    folder.succeed(&["btt", "import", "pool", "v", "--from", "in"]);
    folder.succeed(&["btt", "export", "pool", "v", "--to", "out"]);
    assert!(fs::read(folder.path("out")).unwrap() == fs::read(folder.path("in")).unwrap());
    folder.fail(&["btt", "import", "pool", "v", "--from", "in"], &["holds data", "--force"]);
    image(&folder.path("less"), 2 * MIB, [4].into_iter(), 0x44);
    folder.succeed(&["btt", "import", "pool", "v", "--from", "less", "--force"]);
    folder.succeed(&["btt", "export", "pool", "v", "--to", "out", "--force"]);
    let mut expected = fs::read(folder.path("less")).unwrap();
    expected.resize(8 * MIB as usize, 0);
    assert!(fs::read(folder.path("out")).unwrap() == expected);
    for command in ["info", "check", "repair"] {
        let output = folder.run(&["btt", command, "pool", "v"]);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success() && text.contains("raw: it has no BTT"),
            "{command}: {text}"
        );
    }
}

#[test]
fn volume_in_use_error_names_the_holder() {
    let folder = with_volume();
    let pool = Pool::open(&folder.path("pool"), OpenMode::ReadWrite).unwrap();
    let pid = std::process::id().to_string();
    image(&folder.path("in"), MIB, [0].into_iter(), 1);
    for arguments in [
        &["btt", "export", "pool", "v", "--to", "out"][..],
        &["btt", "import", "pool", "v", "--from", "in"],
        &["btt", "read", "pool", "v", "--sector", "0"],
        &["btt", "write", "pool", "v", "--sector", "0", "--from", "in"],
        &["btt", "check", "pool", "v"],
        &["btt", "repair", "pool", "v", "--dry-run"],
    ] {
        folder.fail(arguments, &["in use by", &pid]);
    }
    folder.succeed(&["btt", "info", "pool", "v"]);
    assert_eq!(names_in(&folder), ["in", "pool"]);
    drop(pool);
    folder.fail(
        &["btt", "export", "pool", "w", "--to", "out"],
        &["no such volume: \"w\"", "existing volumes: \"v\""],
    );
    folder.fail(&["btt", "export", "pool", "--to", "out"], &["VOLUME"]);
    folder.fail(&["btt", "export", "pool", "v", "--file", "in", "--to", "out"], &["--file"]);
    folder.fail(&["btt", "check"], &["POOL"]);
}

#[test]
fn btt_in_a_file_needs_no_pool() {
    let folder = Folder::new();
    let media = MemoryMedia::new(18 * MIB);
    Layout::new(18 * MIB, 512, uuid::Uuid::from_u128(3)).unwrap().format(&media).unwrap();
    fs::write(folder.path("media"), media.to_bytes()).unwrap();
    let text = folder.succeed(&["btt", "check", "--file", "media"]);
    assert!(text.starts_with("clean"), "{text}");
    assert_eq!(folder.json(&["btt", "info", "--file", "media", "--json"])["sector_bytes"], 512);
    fs::write(folder.path("in"), vec![0x5a; 5 * 512]).unwrap();
    folder.succeed(&["btt", "import", "--file", "media", "--from", "in"]);
    {
        // A file that one process has open for writing cannot be opened by another.
        let engine = Engine::open(BttFile::open(&folder.path("media"), true).unwrap()).unwrap();
        let mut sector = [0; 512];
        engine.read(4, &mut sector).unwrap();
        assert_eq!(sector, [0x5a; 512]);
        folder.fail(&["btt", "check", "--file", "media"], &["media", "in use by"]);
    }
    let read = folder.run(&["btt", "read", "--file", "media", "--sector", "4", "--count", "2"]);
    assert!(read.stdout == [[0x5a; 512], [0; 512]].concat());
    folder.succeed(&["create", "pool", "--size", "64M"]);
    folder.fail(&["btt", "check", "--file", "pool"], &["pool is a pool", "without --file"]);
    fs::write(folder.path("empty"), "").unwrap();
    folder.fail(&["btt", "check", "--file", "empty"], &["empty is empty"]);
    fs::write(folder.path("zeros"), vec![0; 20 << 20]).unwrap();
    let output = folder.run(&["btt", "check", "--file", "zeros"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8(output.stdout)
            .unwrap()
            .contains("arena 0: damaged: neither info block is intact")
    );
    assert!(!folder.run(&["btt", "export", "--file", "zeros", "--to", "out"]).status.success());
    assert!(!folder.path("out").exists());
}

/// Returns the offsets of the volume's map and log in the pool file.
fn map_and_log_offsets(folder: &Folder) -> (u64, u64) {
    let arena = &folder.json(&["btt", "info", "pool", "v", "--json"])["arenas"][0];
    let place = |name: &str| VOLUME_AT + arena[name].as_u64().unwrap();
    (place("map_at_bytes"), place("log_at_bytes"))
}

#[test]
fn btt_repair_reports_steps_and_leaves_unexplained_damage() {
    let folder = with_volume();
    image(&folder.path("in"), 4 * MIB, 0..100, 0x11);
    folder.succeed(&["btt", "import", "pool", "v", "--from", "in"]);
    let (map_at, log_at) = map_and_log_offsets(&folder);
    let good = fs::read(folder.path("pool")).unwrap();
    overwrite(&folder.path("pool"), INFO_AT + 100, &[0xff]);
    overwrite(&folder.path("pool"), log_at + 64 * 30 + 12, &[9]);
    overwrite(&folder.path("pool"), map_at + 4 * 12, &[0xff; 4]);
    overwrite(&folder.path("pool"), map_at + 4 * 15, &[0xff; 4]);
    let damaged = fs::read(folder.path("pool")).unwrap();
    let check = folder.run(&["btt", "check", "pool", "v"]);
    let text = String::from_utf8(check.stdout).unwrap();
    assert_eq!(check.status.code(), Some(1));
    for words in [
        "arena 0: damaged: the first info block is damaged",
        "arena 0: damaged: lane 30 of the flog",
        "arena 0: damaged: sector L12 is mapped to block",
        "not clean: 4 findings; `pmvol btt repair pool v --dry-run`",
    ] {
        assert!(text.contains(words), "{text}");
    }
    let text = folder.succeed(&["btt", "repair", "pool", "v", "--dry-run"]);
    assert!(text.contains("would repair: arena 0: 2 sector(s) are marked as lost"), "{text}");
    assert!(damaged == fs::read(folder.path("pool")).unwrap(), "a dry run changed something");
    let text = folder.succeed(&["btt", "repair", "pool", "v"]);
    assert!(
        text.contains("repairs: arena 0: ") && text.ends_with("repaired; no damage remains\n"),
        "{text}"
    );
    assert_eq!(folder.succeed(&["btt", "repair", "pool", "v"]), "nothing to repair\n");
    let check = folder.succeed(&["btt", "check", "pool", "v"]);
    assert!(check.contains("note: 2 sector(s) marked as lost"), "{check}");
    let output = folder.run(&["btt", "export", "pool", "v", "--to", "out"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text.contains("sector 12 cannot be read") && text.contains("sector 15 cannot be read"),
        "{text}"
    );
    let mut expected = as_long_as_the_volume(&folder, "in");
    [12, 15].iter().for_each(|n| expected[n * SECTOR_BYTES..(n + 1) * SECTOR_BYTES].fill(0));
    assert!(fs::read(folder.path("out")).unwrap() == expected);
    // Sectors are readable again after they have been written.
    assert!(write(&folder, "12", &vec![1; 4 * SECTOR_BYTES]).status.success());
    assert!(!folder.succeed(&["btt", "check", "pool", "v"]).contains("marked as lost"));

    // Two sectors share one block, so its owner is unknown.
    fs::write(folder.path("pool"), &good).unwrap();
    let entry = good[map_at as usize + 4 * 20..][..4].to_vec();
    overwrite(&folder.path("pool"), map_at + 4 * 12, &entry);
    let output = folder.run(&["btt", "repair", "pool", "v"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text.contains("left: arena 0: block B")
            && text.contains("`pmvol btt export pool v --to FILE`")
    );
    let output = folder.run(&["btt", "repair", "pool", "v", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["clean"], report["left"].as_array().unwrap().len()), (&false.into(), 2));
    let text = folder.succeed(&["btt", "repair", "pool", "v", "--give-up-sectors"]);
    assert!(text.contains("2 sector(s) are marked as lost") && text.contains("L12, L20"), "{text}");
    let read = folder.run(&["btt", "read", "pool", "v", "--sector", "20"]);
    assert_eq!((read.status.code(), read.stdout), (Some(1), vec![0; SECTOR_BYTES]));
}

#[test]
fn readable_data_of_a_damaged_pool_is_exported() {
    let folder = with_volume();
    let count = sectors(&folder);
    image(&folder.path("in"), count * SECTOR_BYTES as u64, 0..count, 0x77);
    folder.succeed(&["btt", "import", "pool", "v", "--from", "in"]);
    // Clears the owner words of chunks 5 and 6, the fourth and fifth of the volume, and their
    // copies. A repair cannot distinguish these chunks.
    overwrite(&folder.path("pool"), (2 << 20) + 5 * 16, &[0; 16]);
    overwrite(&folder.path("pool"), (2 << 20) + 6 * 16, &[0; 16]);
    let before = fs::read(folder.path("pool")).unwrap();
    assert_eq!(folder.run(&["repair", "pool"]).status.code(), Some(1));
    folder
        .fail(&["btt", "import", "pool", "v", "--from", "in", "--force"], &["owner word of chunk"]);
    let output = folder.run(&["btt", "export", "pool", "v", "--to", "out"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("the volume lacks this chunk") && text.contains("1024 sector(s) could not"),
        "{text}"
    );
    assert!(before == fs::read(folder.path("pool")).unwrap());
    let (there, wanted) =
        (fs::read(folder.path("out")).unwrap(), fs::read(folder.path("in")).unwrap());
    let lost =
        there.chunks(SECTOR_BYTES).zip(wanted.chunks(SECTOR_BYTES)).filter(|(there, wanted)| {
            assert!(there == wanted || there.iter().all(|byte| *byte == 0));
            there != wanted
        });
    assert_eq!(lost.count(), 1024);
}

/// Creates a volume of two arenas with data in all sectors.
fn with_two_arenas() -> (Folder, Vec<u8>) {
    let folder = with_volume();
    folder.succeed(&["volume", "resize", "pool", "v", "--size", "48M"]);
    let count = sectors(&folder);
    image(&folder.path("in"), count * SECTOR_BYTES as u64, 0..count, 0x77);
    folder.succeed(&["btt", "import", "pool", "v", "--from", "in"]);
    let content = fs::read(folder.path("in")).unwrap();
    (folder, content)
}

/// Overwrites bytes of the volume in the pool file.
fn overwrite_volume(folder: &Folder, at: u64, bytes: &[u8]) {
    let pool = Pool::open(&folder.path("pool"), OpenMode::ReadOnly).unwrap();
    let volume = pool.open_volume("v").unwrap();
    let extent =
        volume.extents().iter().rfind(|extent| extent.volume_offset_bytes() <= at).unwrap();
    overwrite(
        &folder.path("pool"),
        extent.offset_bytes() + at - extent.volume_offset_bytes(),
        bytes,
    );
}

#[test]
fn lost_arena_is_reported_and_sectors_keep_their_numbers() {
    let (folder, content) = with_two_arenas();
    let info = folder.json(&["btt", "info", "pool", "v", "--json"]);
    let second = &info["arenas"][1];
    let first_lost = second["first_sector"].as_u64().unwrap();
    for at in
        [second["start_bytes"].as_u64().unwrap(), second["end_bytes"].as_u64().unwrap() - 4096]
    {
        overwrite_volume(&folder, at + 60, &[0xff; 4]);
    }
    let output = folder.run(&["btt", "export", "pool", "v", "--to", "out"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    let last = content.len() / SECTOR_BYTES - 1;
    let named = format!(
        "sectors {first_lost} to {last} cannot be read: they are in arena 1, which is lost"
    );
    assert!(
        text.contains(&named) && text.contains("arena 1: neither info block is intact"),
        "{text}"
    );
    let mut expected = content;
    expected[first_lost as usize * SECTOR_BYTES..].fill(0);
    assert!(fs::read(folder.path("out")).unwrap() == expected);
    let read = folder.run(&[
        "btt",
        "read",
        "pool",
        "v",
        "--sector",
        &(first_lost - 1).to_string(),
        "--count",
        "2",
    ]);
    assert_eq!(read.status.code(), Some(1));
    assert!(
        read.stdout == expected[(first_lost as usize - 1) * SECTOR_BYTES..][..2 * SECTOR_BYTES]
    );
    // The message does not mention --force, because it would not help.
    for force in [&[][..], &["--force"]] {
        let import = ["btt", "import", "pool", "v", "--from", "in"];
        folder.fail(
            &[&import, force].concat(),
            &["arena 1 is read-only: neither info block", "`pmvol btt repair`"],
        );
    }
}

const OLD_DATA: &str =
    "arena 0: sectors that were written last may hold old data, or data of other sectors";

#[test]
fn damaged_log_sets_the_exit_code() {
    let folder = with_volume();
    image(&folder.path("in"), 4 * MIB, 0..100, 0x11);
    folder.succeed(&["btt", "import", "pool", "v", "--from", "in"]);
    let (_, log_at) = map_and_log_offsets(&folder);
    overwrite(&folder.path("pool"), log_at + 64 * 30 + 12, &[9]);
    for arguments in [
        &["btt", "export", "pool", "v", "--to", "out"][..],
        &["btt", "read", "pool", "v", "--sector", "0"],
    ] {
        let output = folder.run(arguments);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("arena 0: lane 30 of the flog"), "{text}");
        assert!(text.contains(OLD_DATA), "{text}");
    }
    assert!(fs::read(folder.path("out")).unwrap() == as_long_as_the_volume(&folder, "in"));
    // Clears the owner word of the volume's last chunk, which contains the log.
    overwrite(&folder.path("pool"), (2 << 20) + 13 * 16, &[0; 8]);
    let output = folder.run(&["btt", "export", "pool", "v", "--to", "out", "--force"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("arena 0: the flog cannot be read"), "{text}");
    assert!(text.contains(OLD_DATA), "{text}");
}

#[test]
fn import_over_a_damaged_log_does_not_advise_force() {
    let folder = with_volume();
    image(&folder.path("in"), 4 * MIB, 0..100, 0x11);
    let (_, log_at) = map_and_log_offsets(&folder);
    overwrite(&folder.path("pool"), log_at + 64 * 30 + 12, &[9]);
    for force in [&[][..], &["--force"]] {
        let output = folder.run(&[&["btt", "import", "pool", "v", "--from", "in"], force].concat());
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("arena 0 is read-only: lane 30 of the flog"), "{text}");
        assert!(!text.contains("--force"), "{text}");
    }
}

#[test]
fn state_of_info_blocks_is_reported() {
    let folder = with_volume();
    let good = fs::read(folder.path("pool")).unwrap();
    let end = VOLUME_AT + 24 * MIB - 4096;
    let is = |words: &str| {
        let text = folder.succeed(&["btt", "info", "pool", "v"]);
        assert!(text.contains(&format!("info block {words}\n")), "{text}");
    };
    is("both are intact");
    overwrite(&folder.path("pool"), end + 60, &[0xff]);
    is("only the first is intact");
    fs::write(folder.path("pool"), &good).unwrap();
    overwrite(&folder.path("pool"), INFO_AT + 60, &[0xff]);
    is("only the second is intact");
    // Changes the UUID and corrects the checksum. In the upper half of the Fletcher sum, the weight
    // of the first word is the number of all words.
    let mut info = good[INFO_AT as usize..][..4096].to_vec();
    info[16] ^= 1;
    let words = info[..4088].chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
    let (low, high) = words.chain([0, 0]).fold((0u32, 0u32), |(low, high), word| {
        let low = low.wrapping_add(word);
        (low, high.wrapping_add(low))
    });
    info[4088..].copy_from_slice(&(u64::from(high) << 32 | u64::from(low)).to_le_bytes());
    fs::write(folder.path("pool"), &good).unwrap();
    overwrite(&folder.path("pool"), end, &info);
    is("both are intact but differ: the first is used");
}

/// Write access to the folder should not allow another user to redirect the export to other files.
#[test]
fn export_follows_no_link_and_replaces_only_with_force() {
    let folder = with_volume();
    image(&folder.path("in"), 4 * MIB, 0..100, 0x11);
    folder.succeed(&["btt", "import", "pool", "v", "--from", "in"]);
    fs::write(folder.path("precious"), b"precious").unwrap();
    for name in ["out", "out.part", "out.qcow2", "out.raw"] {
        std::os::unix::fs::symlink("precious", folder.path(name)).unwrap();
    }
    folder.fail(&["btt", "export", "pool", "v", "--to", "out", "--force"], &["not a regular file"]);
    fs::remove_file(folder.path("out")).unwrap();
    folder.succeed(&["btt", "export", "pool", "v", "--to", "out"]);
    assert!(fs::read(folder.path("out")).unwrap() == as_long_as_the_volume(&folder, "in"));
    assert_eq!(fs::read(folder.path("precious")).unwrap(), b"precious");
    assert!(fs::symlink_metadata(folder.path("out.part")).unwrap().is_symlink());
}

/// Runs qemu-img, which ci/setup installs. Returns `None` if it is missing, and the caller skips
/// its test.
fn qemu_img(folder: &Folder, arguments: &[&str]) -> Option<()> {
    match Command::new("qemu-img").args(arguments).current_dir(folder.0.path()).output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("skipped: qemu-img is not installed (Debian: qemu-utils)");
            None
        }
        output => {
            let output = output.unwrap();
            assert!(
                output.status.success(),
                "{arguments:?}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
            Some(())
        }
    }
}

fn names_in(folder: &Folder) -> Vec<String> {
    let entries = fs::read_dir(folder.0.path()).unwrap();
    let mut names: Vec<_> =
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn qcow2_export_and_import_work_with_real_qemu_img() {
    let folder = with_volume();
    image(&folder.path("in"), 4 * MIB, (0..1024).step_by(3), 0x11);
    folder.succeed(&["btt", "import", "pool", "v", "--from", "in"]);
    if qemu_img(&folder, &["--version"]).is_none() {
        return;
    }
    folder.succeed(&["btt", "export", "pool", "v", "--to", "out.qcow2", "--format", "qcow2"]);
    qemu_img(&folder, &["check", "-f", "qcow2", "out.qcow2"]).unwrap();
    qemu_img(&folder, &["convert", "-f", "qcow2", "-O", "raw", "out.qcow2", "theirs"]).unwrap();
    assert!(fs::read(folder.path("theirs")).unwrap() == as_long_as_the_volume(&folder, "in"));
    folder.succeed(&["volume", "create", "pool", "w", "--size", "24M"]);
    let import = ["btt", "import", "pool", "w", "--from", "out.qcow2"];
    folder.fail(&import, &["begins like a qcow2 image", "--format raw", "--format qcow2"]);
    let text = folder.succeed(&[&import[..], &["--format", "qcow2"]].concat());
    assert!(text.contains("of which 1.3 MiB are data"), "{text}");
    folder.succeed(&["btt", "export", "pool", "w", "--to", "out"]);
    assert!(fs::read(folder.path("out")).unwrap() == as_long_as_the_volume(&folder, "in"));
    // Images of both versions whose size differs from the volume's.
    qemu_img(&folder, &["convert", "-f", "raw", "-O", "qcow2", "-o", "compat=0.10", "in", "old"])
        .unwrap();
    folder
        .succeed(&["btt", "import", "pool", "w", "--from", "old", "--format", "qcow2", "--force"]);
    folder.succeed(&["btt", "export", "pool", "w", "--to", "out", "--force"]);
    assert!(fs::read(folder.path("out")).unwrap() == as_long_as_the_volume(&folder, "in"));
    qemu_img(&folder, &["create", "-f", "qcow2", "vast", "4T"]).unwrap();
    let words = ["vast", "4398046511104 bytes (4 TiB)", "has room for"];
    folder.fail(
        &["btt", "import", "pool", "v", "--from", "vast", "--format", "qcow2", "--force"],
        &words,
    );
    folder.fail(
        &["btt", "import", "pool", "v", "--from", "in", "--format", "qcow2"],
        &["in", "not a qcow2 image"],
    );
    let names = ["in", "old", "out", "out.qcow2", "pool", "theirs", "vast"];
    assert_eq!(names_in(&folder), names);
}

/// A qcow2 header that a guest writes to sector 0 is never interpreted, and passes through export
/// and import unchanged.
#[test]
fn qcow2_header_written_by_guest_exposes_no_host_files() {
    const SECRET: &[u8; 16] = b"the host's alone";
    let folder = with_volume();
    fs::write(folder.path("secret"), SECRET.repeat(4096)).unwrap();
    let names_the_secret: [&[&str]; 2] = [
        &["create", "-q", "-f", "qcow2", "-b", "secret", "-F", "raw", "evil"],
        // With `data_file_raw`, qemu-img uses the existing file as the image's data instead of
        // creating it.
        &["create", "-q", "-f", "qcow2", "-o", "data_file=secret,data_file_raw=on", "evil", "64K"],
    ];
    for (arguments, words) in
        names_the_secret.into_iter().zip(["backing file", "external data file"])
    {
        if qemu_img(&folder, arguments).is_none() {
            return;
        }
        fs::write(folder.path("secret"), SECRET.repeat(4096)).unwrap();
        // Without the check, qemu-img does follow the header, so the image is harmful.
        qemu_img(&folder, &["convert", "-f", "qcow2", "-O", "raw", "evil", "followed"]).unwrap();
        assert!(fs::read(folder.path("followed")).unwrap().starts_with(SECRET), "{words}");

        let mut evil = fs::read(folder.path("evil")).unwrap();
        evil.resize(evil.len().next_multiple_of(SECTOR_BYTES), 0);
        fs::write(folder.path("sectors"), &evil).unwrap();
        folder.succeed(&["btt", "write", "pool", "v", "--sector", "0", "--from", "sectors"]);
        folder.succeed(&["btt", "export", "pool", "v", "--to", "out", "--force"]);
        let import = ["btt", "import", "pool", "v", "--from", "out", "--force"];
        folder.fail(&import, &["out", "begins like a qcow2 image", "a guest"]);
        folder.fail(&[&import[..], &["--format", "qcow2"]].concat(), &["out", words, "not read"]);
        folder.succeed(&[&import[..], &["--format", "raw"]].concat());
        folder.succeed(&["btt", "export", "pool", "v", "--to", "again", "--force"]);
        let (out, again) =
            (fs::read(folder.path("out")).unwrap(), fs::read(folder.path("again")).unwrap());
        assert!(out == again && out.starts_with(&evil));
    }
}

#[test]
fn missing_or_failing_qemu_img_is_reported() {
    let folder = with_volume();
    let run = |path: &str, arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pmvol"));
        let output = command
            .args(arguments)
            .env("PATH", path)
            .current_dir(folder.0.path())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let export = ["btt", "export", "pool", "v", "--to", "out.qcow2", "--format", "qcow2"];
    let text = run("/nowhere", &export);
    assert!(text.contains("qemu-img is not installed") && text.contains("qemu-utils"), "{text}");
    assert_eq!(names_in(&folder), ["pool"], "the command starts nothing");

    let program = folder.path("qemu-img");
    fs::write(&program, "#!/bin/sh\n[ \"$1\" = --version ]\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let path = folder.0.path().display().to_string();
    assert!(run(&path, &export).contains("qemu-img convert ended with exit status: 1"));
    // Header of version 2 as in QEMU's docs/interop/qcow2.txt, for an image of 1 MiB.
    let mut header = vec![0; 72];
    header[..8].copy_from_slice(b"QFI\xfb\0\0\0\x02");
    header[24..32].copy_from_slice(&MIB.to_be_bytes());
    fs::write(folder.path("in"), header).unwrap();
    let text = run(&path, &["btt", "import", "pool", "v", "--from", "in", "--format", "qcow2"]);
    assert!(text.contains("qemu-img convert ended with exit status: 1"), "{text}");
    assert_eq!(names_in(&folder), ["in", "pool", "qemu-img"]);
}

#[test]
fn interrupted_import_leaves_each_sector_old_or_new() {
    let folder = with_volume();
    let count = sectors(&folder);
    image(&folder.path("old"), count * SECTOR_BYTES as u64, 0..count, 0x11);
    image(&folder.path("new"), count * SECTOR_BYTES as u64, 0..count, 0x22);
    let (old, new) = (fs::read(folder.path("old")).unwrap(), fs::read(folder.path("new")).unwrap());
    folder.succeed(&["btt", "import", "pool", "v", "--from", "old"]);
    let path = folder.path("pool");
    let before = fs::read(&path).unwrap();
    let mut mixed = 0;
    for round in 0..200u64 {
        assert!(round < 199, "no import was interrupted in between: {mixed}");
        OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&before, 0).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_pmvol"));
        let command = command.args(["btt", "import", "pool", "v", "--from", "new", "--force"]);
        let mut child = command.current_dir(folder.0.path()).stdout(Stdio::null()).spawn().unwrap();
        // Killed as soon as it has changed the middle sector of this round's range.
        let with_meter = VOLUME_AT + 8192 + (count + round % 100) * SECTOR_BYTES as u64 / 2;
        let file = File::open(&path).unwrap();
        let was = before[with_meter as usize];
        while child.try_wait().unwrap().is_none() {
            let mut byte = [0];
            file.read_exact_at(&mut byte, with_meter).unwrap();
            if byte[0] != was {
                child.kill().unwrap();
                break;
            }
        }
        child.wait().unwrap();
        assert_eq!(folder.json(&["btt", "check", "pool", "v", "--json"])["clean"], true);
        let read = folder.run(&[
            "btt",
            "read",
            "pool",
            "v",
            "--sector",
            "0",
            "--count",
            &count.to_string(),
        ]);
        assert!(read.status.success());
        let mut fresh = 0;
        for ((there, old), new) in read
            .stdout
            .chunks(SECTOR_BYTES)
            .zip(old.chunks(SECTOR_BYTES))
            .zip(new.chunks(SECTOR_BYTES))
        {
            assert!(there == old || there == new, "a torn sector");
            fresh += u64::from(there == new);
        }
        mixed += u64::from((1..count).contains(&fresh));
        if mixed == 5 {
            break;
        }
    }
}
