//! Raw mode of the terminal, in which the guest receives and echoes every key.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Once;

use parking_lot::Mutex;
use rustix::termios::{InputModes, LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

/// Terminal, with the state to restore. It is global, because a process may also exit without
/// dropping anything.
static ORIGINAL: Mutex<Option<(OwnedFd, Termios)>> = Mutex::new(None);

/// Guard that keeps the terminal in raw mode. Only one console uses the terminal at a time.
#[derive(Debug)]
pub(super) struct RawMode(());

impl RawMode {
    /// Sets `terminal` to raw mode until the guard is dropped or the process exits.
    pub(super) fn enter(terminal: &impl AsFd) -> io::Result<Option<Self>> {
        let original = tcgetattr(terminal)?;
        let mut raw = original.clone();
        // Output processing stays on, because the VMM's own messages go to the same terminal.
        raw.input_modes -= InputModes::ICRNL
            | InputModes::INLCR
            | InputModes::IXON
            | InputModes::BRKINT
            | InputModes::ISTRIP;
        raw.local_modes -=
            LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG | LocalModes::IEXTEN;
        restore_at_exit();
        let held = terminal.as_fd().try_clone_to_owned()?;
        Self::hold((held, original), || tcsetattr(terminal, OptionalActions::Now, &raw))
    }

    /// Stores `original`, and then sets the terminal to raw mode. If this fails, dropping the guard
    /// clears the stored state, because stored state prevents later calls from storing theirs.
    /// Returns no guard while another guard exists.
    fn hold(
        original: (OwnedFd, Termios),
        make_raw: impl FnOnce() -> rustix::io::Result<()>,
    ) -> io::Result<Option<Self>> {
        let guard = {
            let mut held = ORIGINAL.lock();
            let guard = held.is_none().then(|| Self(()));
            held.get_or_insert(original);
            guard
        };
        make_raw()?;
        Ok(guard)
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

fn restore() {
    if let Some((terminal, termios)) = ORIGINAL.lock().take() {
        // An error means that the terminal no longer exists.
        let _ = tcsetattr(&terminal, OptionalActions::Now, &termios);
    }
}

extern "C" fn restore_hook() {
    restore();
}

fn restore_at_exit() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        // SAFETY: the function exists until the process ends, has no arguments and does not unwind.
        // If registration fails, dropping the guard still restores the terminal.
        let _ = unsafe { libc::atexit(restore_hook) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_is_raw_until_the_guard_is_dropped() {
        let (_master, slave) = crate::host_console::testing::terminal();
        let local_modes = || tcgetattr(&slave).unwrap().local_modes;
        let original = (slave.try_clone().unwrap(), tcgetattr(&slave).unwrap());
        // All checks are in one test because they share the global state.
        assert!(RawMode::hold(original, || Err(rustix::io::Errno::IO)).is_err());
        assert!(ORIGINAL.lock().is_none(), "a terminal that failed is not to be restored");
        let before = local_modes();
        assert!(before.contains(LocalModes::ICANON));
        let raw = RawMode::enter(&slave).unwrap();
        let changed = LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        assert!(!local_modes().intersects(changed));
        // Later calls, successful or not, do not affect the first guard.
        let reopened = || (slave.try_clone().unwrap(), tcgetattr(&slave).unwrap());
        assert!(RawMode::hold(reopened(), || Err(rustix::io::Errno::IO)).is_err());
        assert!(RawMode::hold(reopened(), || Ok(())).unwrap().is_none());
        assert!(!local_modes().intersects(changed), "the terminal is still raw");
        drop(raw);
        assert_eq!(local_modes(), before);
    }
}
