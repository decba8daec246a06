//! Runs the command on an emulated host.

use std::fs;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::Signal;

use super::ends;
use super::heartbeat::{self, Heartbeat};
use super::qemu;
use super::qemu_patch;
use super::tail::{LineWatch, Tails};
use super::{Arguments, CUT_OFF, HOST_FAILED, PowerCut, job};
use crate::checkout::{Checkout, copy, create_folder, read, remove_file, rename, write};
use crate::images;
use crate::jobs::{self, GRACE, Job, Scratch};
use crate::kernels;
use crate::messages::{report, write_errors};
use crate::programs;

/// Time that the host has to end a command past its time limit and save its files. QEMU is killed
/// afterwards.
const END_LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);
/// Size of a disk created for `--disk`.
const DISK_MIB: u64 = 512;
/// Size of an NVDIMM created for `--nvdimm-file`.
pub(super) const NVDIMM_FILE_MIB: u64 = 256;
/// Output files of a run. They exist from the start, so that they can be followed.
const OUTPUTS: [&str; 5] = ["stdout", "stderr", "out", "exit", "console.log"];
/// Number of lines from the host's console and from QEMU's output to show after a failure.
const LAST_CONSOLE_LINES: usize = 25;
const LAST_QEMU_LINES: usize = 5;
/// Part of a QEMU warning that every run prints.
const EXPECTED_WARNING: &str = "TCG doesn't support";

pub(super) fn run(checkout: &Checkout, host: &Arguments, reason: &str) -> Result<u8> {
    report!(
        "booting the emulated KVM host ({} CPUs, {} MiB): {reason}",
        host.cpus,
        host.memory_mib
    );
    images::host::build(checkout)?;
    if host.peers {
        images::peers::build(checkout)?;
    }
    create_folder(&checkout.ci("run"))?;
    let scratch = Scratch::new(Some(&checkout.ci("run")), "host.")?;
    let run = scratch.path();
    prepare(checkout, host, run)?;
    let end = Boot::start(checkout, host, run)?.wait()?;
    if let Some(cause) = &end.cause {
        // `xtask test` looks for this line, in addition to panics that the kernel reports.
        let mut console = fs::File::options().append(true).open(run.join("console.log"))?;
        writeln!(console, "\n{}{cause}", ends::CAUSE)?;
    }
    if let Some(out) = &host.out {
        bring_back(run, out, end.cause.is_some())?;
    }
    report(host, run, &end)
}

fn prepare(checkout: &Checkout, host: &Arguments, run: &Path) -> Result<()> {
    // Hard links, so that this run keeps its disks even if another task builds new ones.
    let disks = ["root.ext4", "peers.ext4"];
    for disk in &disks[..if host.peers { 2 } else { 1 }] {
        fs::hard_link(checkout.ci("host").join(disk), run.join(disk))
            .context("Cannot link a disk")?;
    }
    make_outputs(run)?;
    if let Some(disk) = &host.disk {
        make_lasting(disk, DISK_MIB)?;
    }
    if let Some(file) = &host.nvdimm_file {
        make_lasting(file, NVDIMM_FILE_MIB)?;
    }
    job::make(checkout, host, run)
}

/// Creates a file with an ext4 file system that persists across boots, unless the file exists.
fn make_lasting(file: &Path, size_mib: u64) -> Result<()> {
    if file.exists() {
        return Ok(());
    }
    if let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        create_folder(folder)?;
    }
    let mut name = file.file_name().context("not a file's name")?.to_owned();
    name.push(".new");
    let new = file.with_file_name(name);
    remove_file(&new)?;
    let mut mke2fs = programs::system("mke2fs");
    let options = "-q -t ext4 -b 4096 -m 0 -E lazy_itable_init=0,root_owner=0:0";
    mke2fs.args(options.split(' '));
    mke2fs.arg(&new).arg(format!("{size_mib}M"));
    jobs::run(mke2fs.stdout(Stdio::null()))?;
    rename(&new, file)
}

/// Creates the files and pipes that QEMU writes to.
fn make_outputs(run: &Path) -> Result<()> {
    OUTPUTS.iter().try_for_each(|output| write(&run.join(output), ""))?;
    heartbeat::make_pipes(run, "monitor")?;
    heartbeat::make_pipes(run, "beat")
}

struct Boot<'run> {
    host: &'run Arguments,
    run: &'run Path,
    started: Instant,
    qemu: Job,
    tails: Tails,
    heartbeat: Heartbeat,
    /// Time that QEMU has to exit after the command's time limit.
    end_limit: Duration,
    cutter: Option<Cutter>,
}

struct End {
    status: ExitStatus,
    /// Set if the command exceeded its time limit.
    is_late: bool,
    /// Set if QEMU then had to be killed.
    is_ended: bool,
    is_power_cut: bool,
    /// Reason why the run ended before the command did. `None` if the host's kernel powered the
    /// host off.
    cause: Option<String>,
}

impl<'run> Boot<'run> {
    fn start(checkout: &Checkout, host: &'run Arguments, run: &'run Path) -> Result<Self> {
        let kernel = kernels::pin(checkout, kernels::DEFAULT)?.image(checkout)?;
        let files = qemu::Files { kernel: &kernel, initrd: &checkout.ci("host/initrd"), run };
        // SIGKILL, because QEMU may ignore other signals.
        let qemu = qemu_patch::patched_qemu(checkout)?;
        let mut command = programs::ending_with_this_one("KILL", &qemu, programs::user_path())?;
        command.args(qemu::arguments(host, &files));
        if std::env::var_os(qemu::MODULES.0).is_none_or(|folder| folder.is_empty()) {
            command.env(qemu::MODULES.0, qemu::MODULES.1);
        }
        Self::start_with(&mut command, host, run)
    }

    fn start_with(command: &mut Command, host: &'run Arguments, run: &'run Path) -> Result<Self> {
        let log = fs::File::create(run.join("qemu.log"))?;
        command.stdout(log.try_clone()?).stderr(log);
        let heartbeat = Heartbeat::new(run, heartbeat::MAX_UNANSWERED)?;
        let cutter = host.power_cut.as_ref().map(|cut| Cutter::new(run, cut)).transpose()?;
        let mut tails = Tails::new();
        let started = Instant::now();
        let qemu = jobs::spawn_killable(command)?;
        tails.add(&run.join("stdout"), io::stdout())?;
        tails.add(&run.join("stderr"), io::stderr())?;
        Ok(Self { host, run, started, qemu, tails, heartbeat, end_limit: END_LIMIT, cutter })
    }

    /// Waits for QEMU to exit. Meanwhile serves the heartbeat, and enforces the time limit and the
    /// power cut.
    fn wait(mut self) -> Result<End> {
        let timeout = self.host.timeout();
        let (mut has_hung, mut is_ended) = (false, false);
        let status = loop {
            self.heartbeat.send_request(self.started.elapsed() >= timeout)?;
            if let Some(status) = self.wait_for_interval()? {
                break status;
            }
            if !self.heartbeat.receive_response()? {
                has_hung = true;
                break self.end_hung_host()?;
            }
            if self.started.elapsed() >= timeout + self.end_limit {
                is_ended = true;
                break self.end_qemu()?;
            }
        };
        let is_late = self.started.elapsed() >= timeout;
        self.tails.finish();
        let is_power_cut = self.cutter.is_some_and(|cutter| cutter.has_cut)
            && status.signal() == Some(Signal::KILL.as_raw());
        let has_reported = fs::metadata(self.run.join("exit"))?.len() > 0;
        let cause = if has_reported || is_power_cut || is_late {
            None
        } else if has_hung {
            Some(ends::HOST_HUNG.to_owned())
        } else {
            cause(status, &fs::read_to_string(self.run.join("resets.log")).unwrap_or_default())
        };
        Ok(End { status, is_late, is_ended, is_power_cut, cause })
    }

    /// Waits until the next request is due or QEMU has exited.
    fn wait_for_interval(&mut self) -> Result<Option<ExitStatus>> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.qemu.try_wait()? {
                return Ok(Some(status));
            }
            if let Some(cutter) = &mut self.cutter
                && cutter.is_due()?
            {
                self.qemu.signal(Signal::KILL);
            }
            if started.elapsed() >= heartbeat::INTERVAL {
                return Ok(None);
            }
            thread::sleep(POLL);
        }
    }

    /// Kills a hung host. First saves its registers and its kernel's stack if possible.
    fn end_hung_host(&mut self) -> Result<ExitStatus> {
        let (registers, status) = heartbeat::read_registers(self.run, &mut self.qemu)?;
        write(&self.run.join("registers.log"), registers)?;
        match status {
            Some(status) => Ok(status),
            None => self.kill(),
        }
    }

    /// Ends QEMU if the host has not ended in time.
    fn end_qemu(&mut self) -> Result<ExitStatus> {
        self.qemu.signal(Signal::TERM);
        let requested = Instant::now();
        while requested.elapsed() < GRACE {
            if let Some(status) = self.qemu.try_wait()? {
                return Ok(status);
            }
            thread::sleep(POLL);
        }
        self.kill()
    }

    fn kill(&mut self) -> Result<ExitStatus> {
        self.qemu.signal(Signal::KILL);
        self.qemu.wait()
    }
}

/// Power cut with a delay after a line of the command's output.
struct Cutter {
    watch: LineWatch,
    delay: Duration,
    /// Time of the cut. Set when the line appears.
    due: Option<Instant>,
    has_cut: bool,
}

impl Cutter {
    fn new(run: &Path, cut: &PowerCut) -> Result<Self> {
        let watch = LineWatch::new(&run.join("stdout"), &cut.line)?;
        Ok(Self { watch, delay: cut.delay, due: None, has_cut: false })
    }

    /// Returns true once, when the power should be cut.
    fn is_due(&mut self) -> Result<bool> {
        if self.due.is_none() && self.watch.sees_line()? {
            self.due = Some(Instant::now() + self.delay);
        }
        let is_due = !self.has_cut && self.due.is_some_and(|due| Instant::now() >= due);
        self.has_cut |= is_due;
        Ok(is_due)
    }
}

/// Returns why QEMU ended if its guest did not cause it. No console shows this.
fn cause(status: ExitStatus, resets: &str) -> Option<String> {
    if let Some(signal) = status.signal() {
        Some(format!("{} {signal} (9: was memory short?)", ends::ENDED_BY_SIGNAL))
    } else if resets.lines().any(|line| line.starts_with("Triple fault")) {
        Some(ends::TRIPLE_FAULT.to_owned())
    } else {
        None
    }
}

/// Copies the host's logs and the command's files to `out`.
fn bring_back(run: &Path, out: &Path, has_registers: bool) -> Result<()> {
    create_folder(out)?;
    copy(&run.join("console.log"), &out.join(ends::CONSOLE))?;
    // Removes the register dump of an earlier host.
    let registers = out.join(ends::REGISTERS);
    remove_file(&registers)?;
    if has_registers {
        let read = |name: &str| fs::read(run.join(name)).unwrap_or_default();
        write(&registers, [read("resets.log"), read("registers.log")].concat())?;
    }
    if fs::metadata(run.join("out"))?.len() > 0 {
        // The folder belongs to the user and keeps its mode. The host's /out is a tmpfs with mode
        // 1777.
        let mut tar = programs::system("tar");
        tar.arg("-xf").arg(run.join("out")).args(["--no-overwrite-dir", "-C"]).arg(out);
        if !jobs::status(&mut tar)?.success() {
            report!("the files that the command left under $OUT were copied incompletely");
        }
    }
    Ok(())
}

/// Reports how the run ended, and returns its exit code.
fn report(host: &Arguments, run: &Path, end: &End) -> Result<u8> {
    if let Some(cut) = host.power_cut.as_ref().filter(|_| end.is_power_cut) {
        report!("the power was cut {} ms after '{}'", cut.delay.as_millis(), cut.line);
        return Ok(0);
    }
    // The command itself may return the exit code that means a time-out.
    let code = read(&run.join("exit"))?.trim().parse().ok();
    match code.filter(|code| *code != CUT_OFF || !end.is_late) {
        Some(code) => return Ok(code),
        None if code.is_some() || end.is_ended => {
            report!("cut off after {} s", host.timeout_s);
        }
        None => {
            let code = jobs::exit_code(end.status);
            let cause =
                end.cause.clone().unwrap_or_else(|| format!("QEMU ended with exit code {code}"));
            report!("the host ended before the command did: {cause}");
        }
    }
    show_last_lines(run)?;
    Ok(if code.is_some() || end.is_ended { CUT_OFF } else { HOST_FAILED })
}

fn show_last_lines(run: &Path) -> Result<()> {
    let read = |name: &str| {
        let content = fs::read(run.join(name))?;
        io::Result::Ok(String::from_utf8_lossy(&content).replace('\r', ""))
    };
    report!("the host's last lines:");
    let show = |prefix: &str, lines: &[&str], max_lines: usize| {
        for line in &lines[lines.len().saturating_sub(max_lines)..] {
            write_errors(format!("  {prefix}{line}\n").as_bytes());
        }
    };
    let console = read("console.log")?;
    show("| ", &console.lines().collect::<Vec<_>>(), LAST_CONSOLE_LINES);
    let log = read("qemu.log")?;
    let log: Vec<_> = log.lines().filter(|line| !line.contains(EXPECTED_WARNING)).collect();
    show("qemu: ", &log, LAST_QEMU_LINES);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_without_the_guests_doing_have_a_cause() {
        let killed = ExitStatus::from_raw(Signal::KILL.as_raw());
        assert_eq!(cause(killed, "").unwrap(), "QEMU was ended by signal 9 (9: was memory short?)");
        let ended = ExitStatus::from_raw(0);
        let resets = "CPU Reset (CPU 0)\nEAX=0\nTriple fault\n";
        assert_eq!(cause(ended, resets).unwrap(), "a CPU triple-faulted");
        assert_eq!(cause(ended, "CPU Reset (CPU 0)\n"), None);
    }

    /// Returns the exit code for a run that left this exit file.
    fn code(exit: &str, end: &End) -> u8 {
        let run = tempfile::tempdir().unwrap();
        for name in ["console.log", "qemu.log"] {
            fs::write(run.path().join(name), "").unwrap();
        }
        fs::write(run.path().join("exit"), exit).unwrap();
        let host = crate::host::tests::parse("--power-cut a:1 -- a").unwrap();
        report(&host, run.path(), end).unwrap()
    }

    #[test]
    fn cut_offs_and_failed_hosts_have_their_own_exit_codes() {
        let end = |is_late, is_ended, is_power_cut| {
            let status = ExitStatus::from_raw(0);
            End { status, is_late, is_ended, is_power_cut, cause: None }
        };
        for (exit, is_late, is_ended, is_power_cut, expected) in [
            ("7\n", false, false, false, 7),
            ("0\n", true, false, false, 0),
            ("124\n", false, false, false, 124),
            ("124\n", true, false, false, CUT_OFF),
            ("", true, true, false, CUT_OFF),
            ("", false, false, false, HOST_FAILED),
            ("", true, false, false, HOST_FAILED),
            ("", false, false, true, 0),
        ] {
            let code = code(exit, &end(is_late, is_ended, is_power_cut));
            assert_eq!(code, expected, "{exit:?} {is_late} {is_ended} {is_power_cut}");
        }
    }

    /// Runs a shell script instead of QEMU in the run's folder. `limit` may change a limit.
    fn end(run: &Path, host: &Arguments, script: &str, limit: impl FnOnce(&mut Boot<'_>)) -> End {
        make_outputs(run).unwrap();
        let mut shell = Command::new("sh");
        let mut boot =
            Boot::start_with(shell.args(["-c", script]).current_dir(run), host, run).unwrap();
        limit(&mut boot);
        boot.wait().unwrap()
    }

    #[test]
    fn host_that_does_not_end_in_time_is_ended() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path();
        let mut host = crate::host::tests::parse("-- a").unwrap();
        host.timeout_s = 0;
        let end = end(run, &host, "exec sleep 1000", |boot| boot.end_limit = Duration::ZERO);
        assert_eq!(end.status.signal(), Some(Signal::TERM.as_raw()));
        assert!(end.is_ended && end.cause.is_none());
        assert_eq!(report(&host, run, &end).unwrap(), CUT_OFF);
    }

    #[test]
    fn host_that_stands_still_ends_after_its_registers() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path();
        let host = crate::host::tests::parse("-- a").unwrap();
        let script = "read -r command <monitor.in && echo \"output of $command\" >monitor.out";
        let end = end(run, &host, script, |boot| boot.heartbeat = Heartbeat::new(run, 1).unwrap());
        assert_eq!(end.cause.as_deref(), Some("the host stood still"));
        assert_eq!(report(&host, run, &end).unwrap(), HOST_FAILED);
        let out = run.join("brought-back");
        bring_back(run, &out, end.cause.is_some()).unwrap();
        let registers = fs::read_to_string(out.join("host-registers.log")).unwrap();
        assert_eq!(registers, "output of info registers -a\n");
    }
}
