//! Tests the table in docs/reference/consoles.md about files named by flags. Every flag in the
//! table is tested with every kind of content.
//!
//! The test fails if the table contains a flag or phrase that the test does not know. It also fails
//! if a flag of the VMM accepts a path and is not in the table. KVM is not needed.

use std::any::Any;
use std::error::Error;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use foreshore::config::{ConsoleConfig, PmemConfig};
use foreshore::governor::record;
use foreshore_devices::disk::image::{ImageOptions, RawImage};
use foreshore_devices::events::{EventMonitor, Events, Monitor};
use foreshore_devices::host_console::{ConsoleFiles, FileStart, HostConsole, Lines, Port};
use foreshore_devices::memory::backing::ZoneFile;
use foreshore_devices::unix_socket::{self, SocketAccess};
use foreshore_devices::volume::file::PmemFile;
use pmem_volume::Pool;
use pmem_volume::pool::formats::{self, Format};
use pmem_volume::pool::ownership::claim;
use tempfile::TempDir;

const PAGE: &str = include_str!("../../docs/reference/consoles.md");
const MIB: u64 = 1 << 20;
/// Length of every file that has content. This length is valid for a zone and for a disk, and has
/// room for the signatures of all formats.
const FILE_BYTES: u64 = 4 * MIB;

/// Table rows of other programs. They are tested in pmem-volume/pmvol/tests/file_flags.rs and
/// balloon/foreshore-sim/tests/simulator.rs.
const OTHER_PROGRAMS: [&str; 2] = ["`pmvol ", "`foreshore-sim "];
/// Flags that only read their file, or that name a pool or a folder.
const NOT_IN_THE_TABLE: [&str; 8] = [
    "--landlock-rules path=",
    "--kernel",
    "--firmware",
    "--initramfs",
    "--rng src=",
    "--pm-memory pool=",
    "--pm-memory spill_file=",
    "--pm-volume pool=",
];

const LOG: &[u8] = b"2026-01-01T00:00:00Z INFO foreshore: a VM of another day\n";

/// Content that the path has before a flag names it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Content {
    /// Pool that the host has created and marked.
    Pool,
    /// Pool without its mark.
    PoolCopy,
    /// Format from the table in `pmem-volume`.
    Known(&'static Format),
    /// File system that a guest has written since a flag first opened the file.
    WrittenByGuest,
    /// Pool that a guest has written since a flag first opened the file.
    PoolOfGuest,
    /// File without a known signature that a guest has used as a pmem device.
    DiskOfGuest,
    Log,
    /// File with a length, but without data.
    Hole,
    /// File of length 0.
    Nothing,
    /// File that a VM or a pool has open.
    InUse,
    SocketLeftBehind,
}

impl Content {
    fn all() -> impl Iterator<Item = Self> {
        use Content::*;
        let of_guests = [WrittenByGuest, PoolOfGuest, DiskOfGuest];
        let others = [Pool, PoolCopy, Log, Hole, Nothing, InUse, SocketLeftBehind];
        formats::all_formats().map(Self::Known).chain(of_guests).chain(others)
    }

    /// Name of the content in error messages, if flags can detect it.
    fn known(self) -> Option<&'static str> {
        match self {
            Self::Pool | Self::PoolCopy => Some("a pool"),
            Self::Known(format) => Some(format.name()),
            Self::DiskOfGuest => Some("the data of a guest's disk"),
            _ => None,
        }
    }

    /// Creates the content at `path`. The returned file must remain open while the flag is tested.
    fn make(self, path: &Path, flag: Flag) -> Option<File> {
        let hole = || {
            let file = File::create(path).unwrap();
            file.set_len(FILE_BYTES).unwrap();
            file
        };
        match self {
            Self::Pool => drop(Pool::create(path, 16 * MIB, 0).unwrap()),
            Self::PoolCopy => {
                let pool = path.with_extension("pool");
                drop(Pool::create(&pool, 16 * MIB, 0).unwrap());
                // Copies the file without extended attributes, as `fs::copy` does.
                fs::copy(&pool, path).unwrap();
                fs::remove_file(pool).unwrap();
            }
            Self::Known(format) => {
                let file = hole();
                for (offset, bytes) in
                    format.samples(FILE_BYTES).next().expect("a place in the file")
                {
                    file.write_all_at(bytes, offset).unwrap();
                }
            }
            Self::WrittenByGuest => {
                let file = hole();
                let _ = flag.open(path);
                // A flag may have truncated the file.
                file.set_len(FILE_BYTES).unwrap();
                file.write_all_at(b"\x53\xef", 0x438).unwrap();
            }
            Self::PoolOfGuest => {
                drop(hole());
                let _ = flag.open(path);
                let pool = path.with_extension("pool");
                drop(Pool::create(&pool, 16 * MIB, 0).unwrap());
                // Only the contents are replaced, so the file keeps its attributes.
                fs::write(path, fs::read(&pool).unwrap()).unwrap();
                fs::remove_file(pool).unwrap();
            }
            Self::DiskOfGuest => {
                let file = hole();
                drop(Flag("--pmem file=").open(path).unwrap());
                file.write_all_at(&[7; 4096], 0).unwrap();
            }
            Self::Log => hole().write_all_at(LOG, 0).unwrap(),
            Self::Hole => drop(hole()),
            Self::Nothing => drop(File::create(path).unwrap()),
            Self::InUse => {
                drop(hole());
                return Some(claim(path, true, 0).unwrap());
            }
            Self::SocketLeftBehind => drop(UnixListener::bind(path).unwrap()),
        }
        None
    }
}

/// Flag with the rest of the first cell in its row: `--memory-zone file= shared=on`.
#[derive(Clone, Copy, Debug)]
struct Flag<'a>(&'a str);

type Opened = Box<dyn Any>;

fn boxed<T: 'static, E: Error>(result: Result<T, E>) -> Result<Opened, String> {
    match result {
        Ok(opened) => Ok(Box::new(opened)),
        Err(error) => {
            let mut text = error.to_string();
            let mut source = error.source();
            while let Some(error) = source {
                text += &format!(": {error}");
                source = error.source();
            }
            Err(text)
        }
    }
}

impl Flag<'_> {
    /// Opens `path` as a new VM would for this flag, and starts to use it.
    fn open(self, path: &Path) -> Result<Opened, String> {
        let path_text = path.display();
        let listen = |flag| boxed(unix_socket::listen(flag, path, &SocketAccess::default()));
        match self.0 {
            "--serial file=" => open_console(Port::Serial, &format!("file={path_text}")),
            "--console file=" => open_console(Port::Console, &format!("file={path_text}")),
            "--serial socket=" => open_console(Port::Serial, &format!("socket={path_text}")),
            "--console socket=" => open_console(Port::Console, &format!("socket={path_text}")),
            "--event-monitor path=" => {
                let target = EventMonitor::parse(&format!("path={path_text}")).unwrap();
                boxed(Monitor::start(&target, &Events::start()))
            }
            "--log-file" => open_log(path),
            "--memory-zone file= shared=on" => boxed(ZoneFile::open(path, FILE_BYTES, true)),
            "--memory-zone file= shared=off" => boxed(ZoneFile::open(path, FILE_BYTES, false)),
            "--pressure record=" => boxed(record::open(path, 0)),
            "--disk path=" => {
                let options = ImageOptions {
                    readonly: false,
                    direct: false,
                    sparse: true,
                    is_called_raw: false,
                    guest_block_bytes: None,
                };
                boxed(RawImage::open(path, options))
            }
            "--pmem file=" => {
                boxed(PmemFile::open(&PmemConfig::parse(&format!("file={path_text}")).unwrap()))
            }
            "--api-socket" => listen("--api-socket"),
            "--metrics unix:" => listen("--metrics"),
            "--vsock socket=" => listen("--vsock"),
            flag => panic!("{flag}: a flag of the table without a test"),
        }
    }

    /// Returns true if the flag refuses an empty file because of its length.
    fn needs_length(self) -> bool {
        ["--memory-zone file=", "--disk path=", "--pmem file="]
            .iter()
            .any(|flag| self.0.starts_with(flag))
    }

    fn is_of_a_socket(self) -> bool {
        self.0.contains("socket") || self.0.starts_with("--metrics")
    }
}

fn open_console(port: Port, text: &str) -> Result<Opened, String> {
    let config = match port {
        Port::Serial => ConsoleConfig::parse_serial(text),
        Port::Console => ConsoleConfig::parse_console(text),
    };
    let mut files = ConsoleFiles::new(FileStart::Empty, Lines::default());
    let console = boxed(HostConsole::open(port, &config.unwrap(), &mut files))?;
    boxed(files.begin())?;
    Ok(console)
}

/// Runs the VMM as a program, because a process can have only one log.
fn open_log(path: &Path) -> Result<Opened, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_foreshore"));
    let output =
        command.args(["--kernel", "/nonexistent", "-v", "--log-file"]).arg(path).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{message}");
    if message.contains("--log-file: ") { Err(message) } else { Ok(Box::new(())) }
}

struct Row {
    flags: Vec<String>,
    existing: String,
    refused: String,
}

fn rows() -> Vec<Row> {
    let (_, section) = PAGE.split_once("\n## Files that are written\n").expect("the section");
    let section = section.split_once("\n## ").map_or(section, |(section, _)| section);
    let lines = section.lines().filter(|line| line.starts_with("| `"));
    let mut rows: Vec<Row> = Vec::new();
    for line in
        lines.filter(|line| !OTHER_PROGRAMS.iter().any(|program| line[2..].starts_with(program)))
    {
        let cells: Vec<_> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [flags, existing, refused] = cells[..] else { panic!("{line}: not three cells") };
        let refused = match (refused, rows.last()) {
            ("the same", Some(above)) => above.refused.clone(),
            _ => refused.to_owned(),
        };
        rows.push(Row { flags: flags_of(flags), existing: existing.to_owned(), refused });
    }
    rows
}

/// Words in backticks outside parentheses. A word that does not start with `--` belongs to the
/// preceding flag.
fn flags_of(cell: &str) -> Vec<String> {
    let cell = cell.split(" (").next().expect("a cell");
    let mut flags: Vec<String> = Vec::new();
    for word in cell.split('`').skip(1).step_by(2) {
        match flags.last_mut() {
            Some(last) if !word.starts_with("--") => *last += &format!(" {word}"),
            _ => flags.push(word.to_owned()),
        }
    }
    flags
}

impl Row {
    fn refuses(&self, content: Content) -> bool {
        self.refused.split([';', ',']).map(str::trim).any(|phrase| match phrase {
            // A pool has a mark too, but a different one.
            "known content without the mark" => {
                content.known().is_some() && content != Content::DiskOfGuest
            }
            "disks of guests" => content == Content::DiskOfGuest,
            "files in use" => content == Content::InUse,
            "any data" => {
                content.known().is_some()
                    || matches!(
                        content,
                        Content::WrittenByGuest | Content::PoolOfGuest | Content::Log
                    )
            }
            "any file" => true,
            "pools that no guest has written" => {
                [Content::Pool, Content::PoolCopy].contains(&content)
            }
            "everything else" => content != Content::SocketLeftBehind,
            // The following are not files, so they have no content.
            "block devices" | "devices" | "pipes and character devices are written" => false,
            phrase => panic!("{phrase:?}: a phrase of the table without a test"),
        })
    }

    /// Checks the file after a flag has accepted it.
    fn check_use(&self, path: &Path, before: &[u8]) {
        let after = || fs::read(path).unwrap();
        let (existing, and) = self.existing.split_once("; ").unwrap_or((&self.existing, ""));
        // Covered by `rotation_replaces_output_of_a_vmm_alone`.
        assert!(
            ["", "`PATH.1` is replaced if it has the mark"].contains(&and),
            "{and:?}: a phrase without a test"
        );
        match existing {
            "emptied" | "emptied by a new VM, continued by a reboot" => assert_eq!(after(), b""),
            "appended to" => assert!(after().starts_with(before) && after().len() > before.len()),
            "emptied: memory begins as zeros" => {
                assert!(after()[..FILE_BYTES as usize] == vec![0; FILE_BYTES as usize])
            }
            "read" | "writable by the guest" => assert!(after() == before),
            "replaced if it is a stale socket" => {}
            "never written" => panic!("it was taken"),
            existing => panic!("{existing:?}: a phrase of the table without a test"),
        }
    }

    fn check(&self, flag: Flag<'_>, content: Content) {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("file");
        let kept = content.make(&path, flag);
        let read = |path: &Path| {
            if content == Content::SocketLeftBehind { Vec::new() } else { fs::read(path).unwrap() }
        };
        let before = read(&path);
        let result = flag.open(&path).map(drop);
        match (self.refuses(content), result) {
            (true, Err(error)) => {
                let is_named = content.known().is_none_or(|name| error.contains(name));
                let names_content = self.refused.starts_with("known content");
                assert!(is_named || !names_content, "{content:?} is not named: {error}");
                assert!(read(&path) == before, "{content:?} was changed");
                let names =
                    fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
                let others = names.filter(|name| name != "file" && name != "file.lock").count();
                assert_eq!(others, 0, "{content:?}: a file was left behind");
            }
            (false, Ok(())) => self.check_use(&path, &before),
            (true, Ok(())) => panic!("{content:?} was taken"),
            (false, Err(error)) => panic!("{content:?} was refused: {error}"),
        }
        drop(kept);
    }
}

#[test]
fn each_flag_treats_each_content_as_documented() {
    let rows = rows();
    assert_eq!(rows.iter().map(|row| row.flags.len()).sum::<usize>(), 14);
    for row in &rows {
        for flag in &row.flags {
            let flag = Flag(flag);
            for content in Content::all() {
                let is_apart = match content {
                    Content::Nothing => flag.needs_length(),
                    // Other flags cannot open a socket as a file.
                    Content::SocketLeftBehind => !flag.is_of_a_socket(),
                    _ => false,
                };
                if !is_apart {
                    eprintln!("{} with {content:?}", flag.0);
                    row.check(flag, content);
                }
            }
        }
    }
}

/// When a console's file has reached its size limit, it is renamed to `PATH.1`.
#[test]
fn rotation_replaces_output_of_a_vmm_alone() {
    const MAX_BYTES: usize = 64 << 10;
    for (flag, port) in
        [(Flag("--serial file="), Port::Serial), (Flag("--console file="), Port::Console)]
    {
        for content in Content::all().filter(|content| *content != Content::SocketLeftBehind) {
            let folder = TempDir::new().unwrap();
            let [path, older] = ["file", "file.1"].map(|name| folder.path().join(name));
            let kept = content.make(&older, flag);
            let before = fs::read(&older).unwrap();
            let text = format!("file={},max_size={MAX_BYTES}", path.display());
            let config = ConsoleConfig::parse_serial(&text).unwrap();
            let mut files = ConsoleFiles::new(FileStart::Empty, Lines::default());
            let mut console = HostConsole::open(port, &config, &mut files).unwrap().unwrap();
            files.begin().unwrap();
            console.output.send(&vec![b'a'; MAX_BYTES]);
            console.output.send(b"b");
            // When the console is dropped, it waits until all output is written.
            drop(console);
            assert_eq!(fs::read(&path).unwrap(), b"b", "{content:?}");
            let after = fs::read(&older).unwrap();
            if [Content::WrittenByGuest, Content::PoolOfGuest].contains(&content) {
                assert!(after == vec![b'a'; MAX_BYTES], "the earlier output is not kept");
            } else {
                assert!(after == before, "{content:?} was changed");
            }
            drop(kept);
        }
    }
}

/// Flags in the output of `-h` that accept a path, in the format of the table.
fn flags_with_paths(help: &str) -> Vec<String> {
    let (help, _) = help.split_once("\nExamples:").expect("examples");
    let mut flags = Vec::new();
    for line in help.lines().map(str::trim_start).filter(|line| line.starts_with("--")) {
        let (flag, rest) = line.split_once(' ').expect("a flag and its help");
        // The name of the value is followed by the text, which starts with the keys.
        for word in rest.split([',', '|', ' ', '[', ']', '<', '>']) {
            let word = word.trim_end_matches(':');
            let Some(key) = word.strip_suffix("PATH").or_else(|| word.strip_suffix("FILE")) else {
                continue;
            };
            // The path of the API socket can be given without a key.
            let has_key = !key.is_empty() && flag != "--api-socket";
            flags.push(if has_key { format!("{flag} {key}") } else { flag.to_owned() });
        }
    }
    flags.sort();
    flags.dedup();
    flags
}

#[test]
fn every_flag_that_takes_a_path_is_in_the_table() {
    let output = Command::new(env!("CARGO_BIN_EXE_foreshore")).arg("-h").output().unwrap();
    let of_help = flags_with_paths(&String::from_utf8(output.stdout).unwrap());
    // `file= shared=on` and `file= shared=off` count as one flag.
    let two_words = |flag: &String| flag.split(' ').take(2).collect::<Vec<_>>().join(" ");
    let mut known: Vec<_> = rows().iter().flat_map(|row| &row.flags).map(two_words).collect();
    known.extend(NOT_IN_THE_TABLE.map(str::to_owned));
    known.sort();
    known.dedup();
    assert_eq!(of_help, known);
}
