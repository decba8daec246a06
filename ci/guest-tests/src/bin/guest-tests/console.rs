//! Tests of consoles on pseudo terminals and sockets, with a shell in the guest.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use guest_tests::{Guest, GuestBuilder, Kernel, this_tests_kernel};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

guest_tests::tests![
    a_shell_on_a_serial_pty_outlives_its_visitors_and_a_reboot,
    a_shell_on_a_serial_socket_takes_the_newest_client,
    unread_console_does_not_block_the_guest: 120 (extended),
    both_consoles_can_be_the_terminal,
    a_shell_on_a_consoles_pty_follows_the_terminals_size on [V6_12, V6_1 long],
    a_guest_follows_the_size_of_the_vmms_terminal,
];

const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// User of a console.
struct ConsoleClient<F> {
    line: F,
    received: String,
}

impl<F: Read + Write + AsFd> ConsoleClient<F> {
    fn new(line: F) -> Self {
        Self { line, received: String::new() }
    }

    fn send(&mut self, text: &str) -> Result<()> {
        self.line.write_all(text.as_bytes()).context("Cannot write to the line")
    }

    fn wait_for(&mut self, expected: &str) -> Result<String> {
        let since = Instant::now();
        loop {
            if let Some(at) = self.received.find(expected) {
                let rest = self.received.split_off(at + expected.len());
                return Ok(std::mem::replace(&mut self.received, rest));
            }
            ensure!(
                since.elapsed() < ANSWER_LIMIT,
                "Timed out waiting for {expected:?} after:\n{}",
                self.received
            );
            let mut poll = libc::pollfd {
                fd: self.line.as_fd().as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: the pointer is to one valid entry that outlives the call.
            if unsafe { libc::poll(&raw mut poll, 1, 1000) } <= 0 {
                continue;
            }
            let mut data = [0; 4096];
            match self.line.read(&mut data)? {
                0 => bail!("The line ended before {expected:?}, after:\n{}", self.received),
                len => self.received += &String::from_utf8_lossy(&data[..len]),
            }
        }
    }

    /// Makes the guest's shell compute a sum. An echo of the input would prove nothing.
    fn check_shell(&mut self, a: u32, b: u32) -> Result<()> {
        // Input is buffered until the shell has started.
        self.send(&format!("echo sum-$(({a} + {b}))-\n"))?;
        self.wait_for(&format!("sum-{}-", a + b)).map(drop)
    }
}

fn with_shell(console: &str) -> GuestBuilder {
    let mut builder = Guest::builder();
    if console == "hvc0" {
        builder = builder.cmdline("console=hvc0");
    }
    builder.cmdline("foreshore.shell=on")
}

/// Returns the path of a console as reported by the API.
fn path_of(guest: &Guest, section: &str) -> Result<PathBuf> {
    let info = guest.get("vm.info")?;
    let path =
        info["config"][section]["file"].as_str().with_context(|| format!("No file in {info}"))?;
    Ok(PathBuf::from(path))
}

fn open_client(path: &Path) -> Result<ConsoleClient<File>> {
    let line = File::options().read(true).write(true).custom_flags(libc::O_NOCTTY).open(path);
    Ok(ConsoleClient::new(line.with_context(|| format!("Cannot open {}", path.display()))?))
}

fn a_shell_on_a_serial_pty_outlives_its_visitors_and_a_reboot() -> Result<()> {
    let guest = with_shell("ttyS0").argument("--serial", "pty").boot()?;
    let path = path_of(&guest, "serial")?;
    ensure!(path.starts_with("/dev/pts"), "The path of the terminal is {}", path.display());
    let mut client = open_client(&path)?;
    // The text was printed before the terminal was opened.
    client.wait_for("foreshore-guest: ready")?;
    client.check_shell(40, 2)?;
    drop(client);
    guest.run("echo without-a-listener >/dev/ttyS0")?;
    let mut client = open_client(&path)?;
    client.wait_for("without-a-listener")?;
    client.check_shell(100, 1)?;
    guest.reboot_from_inside()?;
    ensure!(path_of(&guest, "serial")? == path, "The terminal changed at the reboot");
    client.wait_for("foreshore-guest: ready")?;
    client.check_shell(1000, 1)?;
    guest.power_off()?;
    ensure!(!path.exists(), "The terminal still exists");
    Ok(())
}

fn a_shell_on_a_serial_socket_takes_the_newest_client() -> Result<()> {
    let builder = with_shell("ttyS0");
    let socket = PathBuf::from(format!("/tmp/foreshore-console-{}", std::process::id()));
    let guest = builder.argument("--serial", &format!("socket={}", socket.display())).boot()?;
    let connect = || -> Result<_> { Ok(ConsoleClient::new(UnixStream::connect(&socket)?)) };
    let mut first = connect()?;
    first.wait_for("foreshore-guest: ready")?;
    first.check_shell(40, 2)?;
    let mut second = connect()?;
    second.check_shell(100, 1)?;
    first.line.set_read_timeout(Some(ANSWER_LIMIT))?;
    let mut rest = String::new();
    first
        .line
        .read_to_string(&mut rest)
        .context("The connection of the first client was not closed")?;
    drop(second);
    let mut third = connect()?;
    third.check_shell(7, 8)?;
    guest.reboot_from_inside()?;
    third.wait_for("foreshore-guest: ready")?;
    third.check_shell(1000, 1)?;
    let info = guest.get("vm.info")?;
    let config = &info["config"]["serial"];
    ensure!(
        config["mode"] == "Socket" && config["socket"] == socket.display().to_string(),
        "{config}"
    );
    // Another VM should not be able to take over the socket.
    let refusal = Guest::builder()
        .argument("--serial", &format!("socket={}", socket.display()))
        .expect_refusal()?;
    ensure!(refusal.message.contains("in use"), "{}", refusal.message);
    third.check_shell(2000, 1)?;
    guest.power_off()?;
    ensure!(!socket.exists(), "The socket still exists");
    Ok(())
}

fn unread_console_does_not_block_the_guest() -> Result<()> {
    let guest = Guest::builder().argument("--serial", "pty").boot()?;
    let path = path_of(&guest, "serial")?;
    // More output than the kernel buffers for a pseudo terminal. Each byte is an exit.
    let flood = |name: &str| {
        guest.run_within(
            ANSWER_LIMIT,
            &format!(
                "yes 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcde | head -n 1600 >/dev/ttyS0; \
                 echo the-end-of-{name} >/dev/ttyS0"
            ),
        )
    };
    // The terminal is first open without a reader, and then closed.
    let idle = open_client(&path)?;
    flood("one-who-does-not-read")?;
    drop(idle);
    flood("nobody")?;
    let mut client = open_client(&path)?;
    client.wait_for("the-end-of-nobody")?;
    guest.no_kernel_complaints()
}

fn both_consoles_can_be_the_terminal() -> Result<()> {
    let guest = Guest::builder().argument("--serial", "tty").argument("--console", "tty").boot()?;
    guest.run("echo from-the-port >/dev/ttyS0; echo from-the-console >/dev/hvc0")?;
    guest.wait_until("both lines are in the log", ANSWER_LIMIT, || {
        let log = guest.vmm_log()?;
        Ok(log.contains("from-the-port") && log.contains("from-the-console"))
    })?;
    ensure!(
        guest.vmm_log()?.contains("both tty"),
        "The log has no warning about the shared terminal"
    );
    Ok(())
}

/// Resizes a terminal as its user would.
fn resize(terminal: &impl AsFd, columns: u16, rows: u16) -> Result<()> {
    let size = Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal, size).context("Cannot resize a terminal")
}

fn wait_for_size(guest: &Guest, columns: u16, rows: u16) -> Result<()> {
    let expected = format!("{rows} {columns}");
    guest.wait_until(&format!("its terminal is {columns} by {rows}"), ANSWER_LIMIT, || {
        Ok(guest.run("stty size </dev/hvc0")?.trim() == expected)
    })
}

fn a_shell_on_a_consoles_pty_follows_the_terminals_size() -> Result<()> {
    let guest = with_shell("hvc0").argument("--console", "pty").boot()?;
    let path = path_of(&guest, "console")?;
    let mut client = open_client(&path)?;
    resize(&client.line, 132, 43)?;
    // The VMM reads the terminal's size when there is input or output.
    client.check_shell(40, 2)?;
    wait_for_size(&guest, 132, 43)?;
    client.send("echo size-$(stty size | tr ' ' x)-\n")?;
    client.wait_for("size-43x132-")?;
    client.send("seq 300; echo done-$((1 + 1))\n")?;
    let all = client.wait_for("done-2")?;
    let lines = all.lines().filter(|line| line.parse::<u32>().is_ok()).count();
    ensure!(lines == 300, "Received {lines} of 300 lines");
    // Resizes with `stty -F`, without any input.
    resize(&open_client(&path)?.line, 90, 25)?;
    wait_for_size(&guest, 90, 25)?;
    // The size should also survive a reboot. Only the class of this kernel's test leaves time for
    // that.
    if this_tests_kernel() == Kernel::V6_1 {
        guest.reboot_from_inside()?;
        wait_for_size(&guest, 90, 25)?;
    }
    guest.no_kernel_complaints()
}

fn a_guest_follows_the_size_of_the_vmms_terminal() -> Result<()> {
    let master =
        openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).context("Cannot open a pseudoterminal")?;
    grantpt(&master)?;
    unlockpt(&master)?;
    let path = PathBuf::from(ptsname(&master, Vec::new())?.into_string()?);
    // The terminal exists as long as a slave is open. This slave keeps the terminal alive after the
    // VMM has closed its slave.
    let _slave = File::options().read(true).write(true).custom_flags(libc::O_NOCTTY).open(&path)?;
    resize(&master, 100, 30)?;
    let mut client = ConsoleClient::new(File::from(master.try_clone()?));
    let guest = with_shell("hvc0").argument("--console", "tty").terminal(&path).boot()?;
    client.check_shell(40, 2)?;
    wait_for_size(&guest, 100, 30)?;
    for (columns, rows) in [(132, 43), (90, 25)] {
        resize(&master, columns, rows)?;
        wait_for_size(&guest, columns, rows)?;
    }
    guest.no_kernel_complaints()
}
