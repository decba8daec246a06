//! Test that the VMM opens a kernel or a firmware only when its own limits are in force. Needs
//! `/dev/kvm`, because the VMM opens it before the kernel.

mod support;

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Stdio;
use std::thread;

use kvm_ioctls::Kvm;
use support::{Process, foreshore};
use tempfile::TempDir;

/// Lease of a file. Another process that opens the file waits until the lease is dropped (fcntl(2),
/// F_SETLEASE).
struct Lease(File);

impl Lease {
    fn take(path: &Path) -> Self {
        let file = File::open(path).unwrap();
        // SAFETY: the calls take numbers. A file whose lease is being broken raises SIGIO, which
        // would end the process.
        let result = unsafe {
            libc::signal(libc::SIGIO, libc::SIG_IGN);
            libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK)
        };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        Self(file)
    }

    /// Returns true if another process waits for the file.
    fn is_awaited(&self) -> bool {
        // SAFETY: the call takes numbers.
        unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_GETLEASE) != libc::F_WRLCK }
    }
}

#[test]
fn kernel_and_firmware_are_opened_when_all_limits_are_in_force() {
    if let Err(error) = Kvm::new().and_then(|kvm| kvm.create_vm()) {
        return eprintln!("skipped: /dev/kvm: {error}");
    }
    // The VMM refuses a host whose CPU flags contain neither svm nor vmx.
    let processors = fs::read_to_string("/proc/cpuinfo").unwrap();
    if !processors.split_whitespace().any(|flag| ["svm", "vmx"].contains(&flag)) {
        return eprintln!("skipped: the processor shows neither svm nor vmx");
    }
    for flag in ["--kernel", "--firmware"] {
        let folder = TempDir::new().unwrap();
        let [payload, log] = ["payload", "log"].map(|name| folder.path().join(name));
        fs::write(&payload, "no kernel").unwrap();
        let lease = Lease::take(&payload);
        let mut command = foreshore();
        command.arg(flag).arg(&payload).args(["--memory", "size=64M", "-v", "--log-file"]);
        command.arg(&log).args(["--serial", "off"]).stdin(Stdio::null());
        let mut vmm = Process::spawn(&mut command);
        while !lease.is_awaited() {
            if let Some(status) = vmm.exit_status() {
                let log = fs::read_to_string(&log).unwrap_or_default();
                panic!("{status} before {flag} was opened: {log}");
            }
            thread::yield_now();
        }
        let status = fs::read_to_string(format!("/proc/{}/status", vmm.id())).unwrap();
        for limit in ["NoNewPrivs:\t1\n", "Seccomp:\t2\n"] {
            assert!(status.contains(limit), "{flag}: no {limit:?} in {status}");
        }
        let log = fs::read_to_string(&log).unwrap();
        let [limited, unsupported] = ["Landlock limits the files", "The kernel has no Landlock"]
            .map(|line| log.contains(line));
        assert!(limited || unsupported, "{flag}: {log}");
    }
}
