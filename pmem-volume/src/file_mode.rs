//! Permissions of the files and sockets that the programs make.

/// Mode of a file or socket that belongs to the user of the program alone.
pub const PRIVATE_MODE: u32 = 0o600;

/// Takes all permissions of other users from the files, directories and sockets that this process makes from now on. The first
/// call of `main`, before there is another thread or a file, because the umask belongs to the process.
pub fn make_files_private() {
    // SAFETY: takes a number, touches no memory and cannot fail (umask(2)).
    unsafe { libc::umask(0o077) };
}
