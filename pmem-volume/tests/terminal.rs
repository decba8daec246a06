//! `pmvol` in front of a terminal: what takes its time shows how far it is.

use std::fs::File;
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::{ptr, thread};

use pmem_volume::{Pool, PoolError, VolumeFormat, VolumeSize};
use tempfile::TempDir;

const GIB: u64 = 1 << 30;

/// A pseudo terminal: our end, and that of a program.
fn terminal() -> (File, OwnedFd) {
    let size = libc::winsize { ws_row: 24, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 };
    let (mut ours, mut theirs) = (-1, -1);
    // SAFETY: openpty() fills two descriptors that outlive the call, reads the size, and takes null for the rest.
    let result = unsafe {
        libc::openpty(&raw mut ours, &raw mut theirs, ptr::null_mut(), ptr::null(), &raw const size)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: both are open, and nobody else's.
    unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) }
}

fn pmvol(arguments: &[&str], folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pmvol"));
    command.args(arguments).current_dir(folder);
    command
}

/// Runs it with stderr on a terminal, and returns what came there. stdout is none.
fn run_on_terminal(arguments: &[&str], folder: &Path) -> (Output, String) {
    let (mut ours, theirs) = terminal();
    let screen = thread::spawn(move || {
        let mut text = Vec::new();
        match ours.read_to_end(&mut text) {
            // So a terminal ends that nobody has open any more (tty_ioctl(4) knows it as a hangup).
            Err(error) if error.raw_os_error() == Some(libc::EIO) => {}
            result => assert!(result.is_ok(), "{result:?}"),
        }
        String::from_utf8_lossy(&text).into_owned()
    });
    let mut command = pmvol(arguments, folder);
    command.env("TERM", "xterm").stderr(theirs).stdout(Stdio::piped());
    let output = command.spawn().unwrap().wait_with_output().unwrap();
    // The command has the last copy of the terminal's other end.
    drop(command);
    (output, screen.join().unwrap())
}

/// A sparse pool with a volume of nearly all of it, whose check reads a map of a thousandth of its size.
fn sparse_pool(folder: &Path, size_bytes: u64) -> bool {
    let options = pmem_volume::CreateOptions {
        size_bytes: Some(size_bytes),
        thin: true,
        ..pmem_volume::CreateOptions::default()
    };
    match Pool::create_with(&folder.join("pool"), options) {
        Ok(pool) => pool.create_volume("v", VolumeSize::Remaining, VolumeFormat::Btt).is_ok(),
        // A tmpfs, which takes no file that is larger than it, or a file system that has no such large ones.
        Err(PoolError::FileSystemFull { .. } | PoolError::Size { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn what_takes_over_a_second_shows_how_far_it_is_and_leaves_no_trace() {
    let folder = TempDir::new_in(std::env::current_dir().unwrap()).unwrap();
    // Larger until it takes long enough, however fast the machine is.
    for doublings in 0..6 {
        let folder = TempDir::new_in(folder.path()).unwrap();
        if !sparse_pool(folder.path(), (256 * GIB) << doublings) {
            eprintln!("skipped: no file system for large sparse files here");
            return;
        }
        let (output, screen) = run_on_terminal(&["check", "pool"], folder.path());
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && text.ends_with("\nclean\n"), "{text}");
        if screen.is_empty() {
            continue;
        }
        assert!(screen.contains("checking [") && screen.contains(" of "), "{screen:?}");
        // Erase the line, and nothing after it (ECMA-48, EL).
        assert!(screen.ends_with("\r\u{1b}[2K"), "{screen:?}");
        let piped = pmvol(&["check", "pool"], folder.path()).output().unwrap();
        assert!(piped.status.success() && piped.stderr.is_empty(), "without a terminal nothing is drawn");
        return;
    }
    panic!("a check of 8 TiB takes less than a second");
}

#[test]
fn what_is_over_soon_draws_nothing_and_an_error_has_its_line_for_itself() {
    let folder = TempDir::new_in("/dev/shm").unwrap();
    let (output, screen) = run_on_terminal(&["create", "pool", "--size", "64M"], folder.path());
    assert!(output.status.success());
    assert_eq!(screen, "");
    let (output, screen) = run_on_terminal(&["grow", "pool", "--size", "64M"], folder.path());
    assert_eq!(output.status.code(), Some(1));
    assert!(screen.starts_with("pmvol: --size: "), "{screen:?}");
}
