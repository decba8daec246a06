//! Tests of `pmvol` in a terminal. Long commands show their progress, and Ctrl-C is safe at any
//! time.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::{ptr, thread};

use pmem_volume::{OpenMode, Pool, PoolError, VolumeFormat, VolumeSize};
use tempfile::TempDir;

const GIB: u64 = 1 << 30;

/// Opens a pseudoterminal. Returns the end of the test and the end of the program.
fn terminal() -> (File, OwnedFd) {
    let size = libc::winsize { ws_row: 24, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 };
    let (mut ours, mut theirs) = (-1, -1);
    // SAFETY: openpty() fills two descriptors that outlive the call, and reads the size. The other
    // pointers may be null.
    let result = unsafe {
        libc::openpty(&raw mut ours, &raw mut theirs, ptr::null_mut(), ptr::null(), &raw const size)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: both descriptors are open, and nothing else owns them.
    unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) }
}

fn pmvol(arguments: &[&str], folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pmvol"));
    command.args(arguments).current_dir(folder);
    // A shell that runs the tests in the background makes all their children ignore SIGINT.
    // SAFETY: signal() is async-signal-safe (signal-safety(7)), and the default action is not a
    // handler.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        });
    }
    command
}

/// Runs `pmvol` with stderr on a terminal, and returns its output and the screen. stdout is not a
/// terminal.
fn run_on_terminal(arguments: &[&str], folder: &Path) -> (Output, String) {
    let (mut ours, theirs) = terminal();
    let screen = thread::spawn(move || {
        let mut text = Vec::new();
        match ours.read_to_end(&mut text) {
            // Read error of a terminal that no process has open any more (a hangup in
            // tty_ioctl(4)).
            Err(error) if error.raw_os_error() == Some(libc::EIO) => {}
            result => assert!(result.is_ok(), "{result:?}"),
        }
        String::from_utf8_lossy(&text).into_owned()
    });
    let mut command = pmvol(arguments, folder);
    command.env("TERM", "xterm").stderr(theirs).stdout(Stdio::piped());
    let output = command.spawn().unwrap().wait_with_output().unwrap();
    // The command holds the last copy of the terminal's other end.
    drop(command);
    (output, screen.join().unwrap())
}

/// Creates a sparse pool that is nearly filled by one volume. The check reads the volume's map,
/// which is about a thousandth of its size.
fn sparse_pool(folder: &Path, size_bytes: u64) -> bool {
    let options = pmem_volume::CreateOptions {
        size_bytes: Some(size_bytes),
        thin: true,
        ..pmem_volume::CreateOptions::default()
    };
    match Pool::create_with(&folder.join("pool"), options) {
        Ok(pool) => pool.create_volume("v", VolumeSize::Remaining, VolumeFormat::Btt).is_ok(),
        // The file exceeds a limit of the file system, for example the size of a tmpfs.
        Err(PoolError::FileSystemFull { .. } | PoolError::Size { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn long_commands_show_a_meter_that_leaves_no_trace() {
    let folder = TempDir::new_in(std::env::current_dir().unwrap()).unwrap();
    // Doubles the size until the check takes long enough, even on a fast machine.
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
        // "Erase the line" (ECMA-48, EL) is the last output.
        assert!(screen.ends_with("\r\u{1b}[2K"), "{screen:?}");
        let piped = pmvol(&["check", "pool"], folder.path()).output().unwrap();
        assert!(
            piped.status.success() && piped.stderr.is_empty(),
            "without a terminal nothing is drawn"
        );
        return;
    }
    panic!("a check of 8 TiB takes less than a second");
}

#[test]
fn short_commands_show_no_meter_and_errors_start_a_line() {
    let folder = TempDir::new_in("/dev/shm").unwrap();
    let (output, screen) = run_on_terminal(&["create", "pool", "--size", "64M"], folder.path());
    assert!(output.status.success());
    assert_eq!(screen, "");
    let (output, screen) = run_on_terminal(&["grow", "pool", "--size", "64M"], folder.path());
    assert_eq!(output.status.code(), Some(1));
    assert!(screen.starts_with("pmvol: --size: "), "{screen:?}");
}

/// Runs a command on a pool, and interrupts it `poll_count` polls after it has started to work.
/// Returns true if the interrupt ended it.
fn interrupted(arguments: &[&str], pool: &Path, poll_count: u32) -> bool {
    let mut command = pmvol(arguments, pool.parent().unwrap());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // `Peek` takes no lock, so it does not block the command.
    let peek = Pool::open(pool, OpenMode::Peek).unwrap();
    while child.try_wait().unwrap().is_none() {
        if peek.holder().is_some() {
            (0..poll_count).for_each(|_| drop(peek.holder()));
            let pid = i32::try_from(child.id()).unwrap();
            // SAFETY: sends a signal to a child that has not been waited for, so its PID cannot
            // have been reused.
            assert_eq!(unsafe { libc::kill(pid, libc::SIGINT) }, 0);
            break;
        }
    }
    child.wait().unwrap().signal() == Some(libc::SIGINT)
}

/// Ctrl-C sends SIGINT to the foreground process group. `pmvol` has no handler, so the process ends
/// immediately.
#[test]
fn interrupted_commands_leave_a_pool_that_opens_and_is_clean() {
    const INTERRUPTIONS: u32 = 20;
    const VOLUME_BYTES: u64 = 192 << 20;
    let folder = TempDir::new_in("/dev/shm").unwrap();
    let path = folder.path().join("pool");
    drop(Pool::create(&path, 256 << 20, 0).unwrap());
    let pages = vec![0x5a; 1 << 20];
    let (mut ended, mut undone, mut waited) = (0, 0, 0);
    for round in 0.. {
        assert!(
            round < 10 * INTERRUPTIONS,
            "only {ended} interruptions: the command ends before it can be interrupted"
        );
        {
            // Creates a volume with data, so that its erasure takes a while.
            let pool = Pool::open(&path, OpenMode::ReadWrite).unwrap();
            if pool.volumes().is_empty() {
                pool.create_volume("v", VolumeSize::Bytes(VOLUME_BYTES), VolumeFormat::Raw)
                    .unwrap();
            }
            let volume = pool.open_volume("v").unwrap();
            for extent in volume.extents() {
                for at in (0..extent.len_bytes()).step_by(pages.len()) {
                    pool.file().write_all_at(&pages, extent.offset_bytes() + at).unwrap();
                }
            }
        }
        if !interrupted(&["volume", "delete", "pool", "v", "--force"], &path, round % 8 * 16) {
            continue;
        }
        ended += 1;
        let pool = Pool::open(&path, OpenMode::ReadOnly).unwrap();
        let report = pool.check().unwrap();
        assert!(report.is_clean(), "{report:?}");
        match pool.volumes().as_slice() {
            [] => waited += u32::from(report.waiting_bytes() > 0),
            [volume] if volume.size_bytes == VOLUME_BYTES && report.waiting_bytes() == 0 => {
                undone += 1
            }
            volumes => panic!("neither deleted nor as it was: {volumes:?}, {report:?}"),
        }
        drop(pool);
        let again = pmvol(&["scrub", "pool"], folder.path()).output().unwrap();
        assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
        assert_eq!(
            Pool::open(&path, OpenMode::ReadOnly).unwrap().check().unwrap().waiting_bytes(),
            0
        );
        if ended == INTERRUPTIONS {
            break;
        }
    }
    println!("{ended} interrupted: {undone} before it was deleted, {waited} while it was erased");
    assert!(waited > 0, "no interruption came during an erasure");
}

#[test]
fn interrupted_creation_leaves_no_file() {
    let folder = TempDir::new_in(std::env::current_dir().unwrap()).unwrap();
    let mut command = pmvol(&["create", "pool", "--size", "64M"], folder.path());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGINT) }, 0);
    let status = child.wait().unwrap();
    let made = match std::fs::metadata(folder.path().join("pool")) {
        Ok(_) => true,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::NotFound);
            false
        }
    };
    assert!(!made || Pool::open(&folder.path().join("pool"), OpenMode::ReadOnly).is_ok());
    assert!(made || status.signal() == Some(libc::SIGINT));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), usize::from(made));
}
