//! Permissions of files and sockets that the programs create.

use rustix::fs::Mode;
use rustix::process::umask;

/// Mode of a file or socket that only the program's user can access.
pub const PRIVATE_MODE: u32 = 0o600;

/// Denies other users all access to files, directories and sockets that this process creates from
/// now on. Call it first in `main`, before any file or thread is created, because all threads share
/// the umask.
pub fn make_files_private() {
    umask(Mode::RWXG | Mode::RWXO);
}
