//! Window size of the terminal behind a console.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, OwnedFd};

use parking_lot::Mutex;
use rustix::termios::tcgetwinsize;
use signal_hook_registry::{SigId, register, unregister};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Window size in characters. Zero if unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowSize {
    pub columns: u16,
    pub rows: u16,
}

/// Window size of a terminal, with notification of changes.
#[derive(Debug)]
pub struct Window {
    terminal: OwnedFd,
    last_size: Mutex<WindowSize>,
    changed: EventFd,
    /// Registered handler of SIGWINCH, for the VMM's own terminal.
    signal: Option<SigId>,
}

impl Window {
    /// Window of the VMM's own terminal, if it has one: standard output, or otherwise standard
    /// input, for example in `foreshore | tee log`.
    pub(super) fn of_the_vmm() -> io::Result<Option<Self>> {
        let terminal = if io::stdout().is_terminal() {
            io::stdout().as_fd().try_clone_to_owned()?
        } else if io::stdin().is_terminal() {
            io::stdin().as_fd().try_clone_to_owned()?
        } else {
            return Ok(None);
        };
        Self::with_signal(terminal).map(Some)
    }

    fn with_signal(terminal: OwnedFd) -> io::Result<Self> {
        let mut window = Self::new(terminal)?;
        let changed = window.changed.try_clone()?;
        // SAFETY: the handler only calls write(2), which signal-safety(7) allows.
        let signal = unsafe { register(libc::SIGWINCH, move || drop(changed.write(1))) };
        window.signal = Some(signal?);
        Ok(window)
    }

    /// Window of a pseudo terminal, given its master side. Linux does not notify the master of a
    /// new size, so the caller must [poll](Self::poll).
    pub(super) fn of_pty(master: &File) -> io::Result<Self> {
        Self::new(master.as_fd().try_clone_to_owned()?)
    }

    fn new(terminal: OwnedFd) -> io::Result<Self> {
        let changed = EventFd::new(EFD_NONBLOCK)?;
        let window = Self { terminal, last_size: Mutex::default(), changed, signal: None };
        *window.last_size.lock() = window.size();
        Ok(window)
    }

    pub fn size(&self) -> WindowSize {
        // A closed terminal has no window size.
        tcgetwinsize(&self.terminal).map_or_else(
            |_| WindowSize::default(),
            |size| WindowSize { columns: size.ws_col, rows: size.ws_row },
        )
    }

    /// Raises the notification if the size has changed since the last call.
    pub(super) fn poll(&self) {
        let mut last_size = self.last_size.lock();
        let now = self.size();
        if std::mem::replace(&mut *last_size, now) != now {
            // The write fails only if the counter is full, and the eventfd is then readable anyway.
            let _ = self.changed.write(1);
        }
    }

    /// Readable when the size may have changed.
    pub fn changed(&self) -> &EventFd {
        &self.changed
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if let Some(signal) = self.signal {
            unregister(signal);
        }
    }
}

#[cfg(test)]
impl Window {
    /// Window of a terminal for a test, with the terminal's other side.
    pub fn of_test() -> (Self, OwnedFd) {
        use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let peer = ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        (Self::of_pty(&master.into()).unwrap(), peer)
    }
}

/// Sets the size of a terminal, as its user would.
#[cfg(test)]
pub fn resize(terminal: &impl AsFd, columns: u16, rows: u16) {
    let size =
        rustix::termios::Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(terminal, size).unwrap();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_size_is_reported_once() {
        let (window, peer) = Window::of_test();
        assert_eq!(window.size(), WindowSize::default());
        window.poll();
        assert!(window.changed().read().is_err(), "an unchanged size was reported");
        resize(&peer, 132, 43);
        assert_eq!(window.size(), WindowSize { columns: 132, rows: 43 });
        window.poll();
        window.poll();
        assert_eq!(window.changed().read().unwrap(), 1);
        resize(&peer, 132, 43);
        window.poll();
        assert!(window.changed().read().is_err());
    }

    #[test]
    fn sigwinch_is_reported_until_the_window_is_dropped() {
        let (_master, peer) = Window::of_test();
        let window = Window::with_signal(peer).unwrap();
        let changed = window.changed().try_clone().unwrap();
        let raise = || {
            // SAFETY: the call touches no memory. Its handler runs before it returns.
            assert_eq!(unsafe { libc::raise(libc::SIGWINCH) }, 0);
        };
        raise();
        assert!(changed.read().is_ok());
        drop(window);
        raise();
        assert!(changed.read().is_err());
    }
}
