//! Pseudo terminal that detects when a client opens or closes it.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, inotify};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, ptsname, unlockpt};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use tracing::debug;

use super::super::Window;

/// Interval of checks for clients if no inotify watch is available.
const POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };

/// Master side of a pseudo terminal, with the path of the slave side.
#[derive(Debug)]
pub(super) struct Pty {
    master: File,
    path: PathBuf,
    /// Readable when a client may have opened or closed the terminal. For example, `stty -F` closes
    /// the terminal after it has set a size, and Linux does not wake waiters on the master then.
    /// Reads do not block.
    arrivals: File,
}

impl Pty {
    /// Opens a new pseudo terminal, which has no client yet. It is in raw mode, because the guest
    /// has its own line discipline.
    pub(super) fn open() -> io::Result<Self> {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let path = PathBuf::from(
            String::from_utf8_lossy(ptsname(&master, Vec::new())?.as_bytes()).as_ref(),
        );
        // Closing this descriptor makes the master report a hang-up, but does not trigger the
        // inotify watch. The terminal keeps its settings.
        let peer = ioctl_tiocgptpeer(
            &master,
            OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC,
        )?;
        let mut settings = tcgetattr(&peer)?;
        settings.make_raw();
        tcsetattr(&peer, OptionalActions::Now, &settings)?;
        drop(peer);
        fcntl_setfl(&master, fcntl_getfl(&master)? | OFlags::NONBLOCK)?;
        let arrivals = arrivals_at(&path)?;
        Ok(Self { master: master.into(), path, arrivals })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Duplicate of the master side in non-blocking mode, for reading or writing.
    pub(super) fn side(&self) -> io::Result<File> {
        self.master.try_clone()
    }

    /// Window size, which the client sets. The caller must poll it.
    pub(super) fn window(&self) -> io::Result<Window> {
        Window::of_pty(&self.master)
    }

    /// Descriptor that becomes readable when [`Self::poll_client`] should be called.
    pub(super) fn arrivals(&self) -> RawFd {
        self.arrivals.as_raw_fd()
    }

    /// Returns true if a client has the terminal open. Clears pending notifications.
    pub(super) fn poll_client(&mut self) -> io::Result<bool> {
        self.forget_arrivals()?;
        Ok(!is_hung_up(&self.master)?)
    }

    fn forget_arrivals(&mut self) -> io::Result<()> {
        let mut events = [0; 4096];
        loop {
            match self.arrivals.read(&mut events) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(err) => return Err(err),
            }
        }
    }
}

/// Creates an inotify watch, or a timer if the user has reached the limit of watches.
fn arrivals_at(path: &Path) -> io::Result<File> {
    let arrivals = watch(path).or_else(|err| {
        debug!(%err, "No inotify watch for a pseudo terminal; polling it instead");
        ticks()
    });
    arrivals.map(File::from)
}

fn watch(path: &Path) -> io::Result<OwnedFd> {
    let watch = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
    inotify::add_watch(&watch, path, inotify::WatchFlags::OPEN | inotify::WatchFlags::CLOSE)?;
    Ok(watch)
}

fn ticks() -> io::Result<OwnedFd> {
    let timer =
        timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
    let ticking = Itimerspec { it_interval: POLL_INTERVAL, it_value: POLL_INTERVAL };
    timerfd_settime(&timer, TimerfdTimerFlags::empty(), &ticking)?;
    Ok(timer)
}

/// Returns true if the peer of a terminal or socket has closed its end.
pub(super) fn is_hung_up(file: &impl AsFd) -> io::Result<bool> {
    let mut end = [PollFd::new(file, PollFlags::empty())];
    poll(&mut end, Some(&Timespec::default()))?;
    Ok(end[0].revents().intersects(PollFlags::HUP | PollFlags::ERR))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt as _;
    use std::time::Duration;

    use super::super::super::readiness::ready;
    use super::*;

    fn open(pty: &Pty) -> File {
        File::options()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NOCTTY)
            .open(pty.path())
            .unwrap()
    }

    #[test]
    fn clients_are_detected_when_they_open_or_close() {
        let mut pty = Pty::open().unwrap();
        drop(watch(pty.path()).expect("an inotify watch"));
        for _ in 0..2 {
            assert!(!pty.poll_client().unwrap());
            let client = open(&pty);
            assert!(ready(pty.arrivals.as_fd(), PollFlags::IN, Duration::from_secs(20)).unwrap());
            assert!(pty.poll_client().unwrap());
            drop(client);
        }
    }

    #[test]
    fn clients_are_polled_without_a_watch() {
        let mut pty = Pty::open().unwrap();
        pty.arrivals = arrivals_at(Path::new("/nowhere")).unwrap();
        // A check before the timer expires does not block.
        assert!(fcntl_getfl(&pty.arrivals).unwrap().contains(OFlags::NONBLOCK));
        assert!(!pty.poll_client().unwrap());
        let _client = open(&pty);
        for _ in 0..2 {
            assert!(ready(pty.arrivals.as_fd(), PollFlags::IN, Duration::from_secs(20)).unwrap());
            assert!(pty.poll_client().unwrap());
        }
    }

    #[test]
    fn bytes_pass_unchanged() {
        let pty = Pty::open().unwrap();
        let (mut master, mut client) = (pty.side().unwrap(), open(&pty));
        let all: Vec<u8> = (0..=255).collect();
        let mut got = [0; 256];
        master.write_all(&all).unwrap();
        client.read_exact(&mut got).unwrap();
        assert_eq!(got[..], all);
        client.write_all(&all).unwrap();
        let mut len = 0;
        while len < got.len() {
            assert!(ready(master.as_fd(), PollFlags::IN, Duration::from_secs(20)).unwrap());
            len += master.read(&mut got[len..]).unwrap();
        }
        assert_eq!(got[..], all);
    }
}
