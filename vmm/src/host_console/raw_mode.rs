//! Raw mode of the terminal: every key goes to the guest, and the guest echoes.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::sync::Once;

use parking_lot::Mutex;

/// What to give back, and to which terminal. Global, because a process may also end without
/// dropping anything.
static ORIGINAL: Mutex<Option<(RawFd, libc::termios)>> = Mutex::new(None);

/// The terminal is raw while this lives. There is one console on the terminal at a time.
#[derive(Debug)]
pub(super) struct RawMode(());

impl RawMode {
    /// Makes the terminal `fd` raw until this is dropped, or until the process exits, whichever
    /// comes first. `fd` must stay open as long.
    pub(super) fn enter(fd: RawFd) -> io::Result<Self> {
        let mut termios = MaybeUninit::<libc::termios>::uninit();
        // SAFETY: tcgetattr fills a whole termios.
        if unsafe { libc::tcgetattr(fd, termios.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: tcgetattr has succeeded.
        let original = unsafe { termios.assume_init() };
        let mut raw = original;
        // Output stays cooked: the VMM's own messages go to the same terminal.
        raw.c_iflag &= !(libc::ICRNL | libc::INLCR | libc::IXON | libc::BRKINT | libc::ISTRIP);
        raw.c_lflag &= !(libc::ICANON | libc::ECHO | libc::ISIG | libc::IEXTEN);
        restore_at_exit();
        ORIGINAL.lock().get_or_insert((fd, original));
        // SAFETY: `raw` is a whole termios.
        if unsafe { libc::tcsetattr(fd, libc::TCSANOW, &raw) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(()))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

fn restore() {
    if let Some((fd, termios)) = ORIGINAL.lock().take() {
        // SAFETY: `termios` is a whole one. An error means that the terminal is gone.
        unsafe { libc::tcsetattr(fd, libc::TCSANOW, &termios) };
    }
}

extern "C" fn restore_hook() {
    restore();
}

fn restore_at_exit() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        // SAFETY: the function lives as long as the program, takes nothing and does not unwind.
        // Without room for it the terminal is still restored by whoever drops the guard.
        let _ = unsafe { libc::atexit(restore_hook) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_is_raw_until_the_guard_is_dropped() {
        let (mut master, mut slave) = (0, 0);
        let null = std::ptr::null_mut();
        // SAFETY: the two numbers are written, the other arguments may be null.
        let made =
            unsafe { libc::openpty(&mut master, &mut slave, null, null.cast(), null.cast()) };
        assert_eq!(made, 0);
        let local_flags = || {
            let mut termios = MaybeUninit::<libc::termios>::uninit();
            // SAFETY: tcgetattr fills a whole termios, and is checked.
            unsafe {
                assert_eq!(libc::tcgetattr(slave, termios.as_mut_ptr()), 0);
                termios.assume_init().c_lflag
            }
        };
        let before = local_flags();
        assert_ne!(before & libc::ICANON, 0);
        let raw = RawMode::enter(slave).unwrap();
        assert_eq!(local_flags() & (libc::ICANON | libc::ECHO | libc::ISIG), 0);
        drop(raw);
        assert_eq!(local_flags(), before);
    }
}
