//! Runs the same guests under Debian's QEMU, for benchmark comparisons and for tests of the harness
//! itself.

use std::io::{BufRead, BufReader, Write};
use std::ops::Deref;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::guest::{BOOT_LIMIT, Endpoint, Image, Kernel, Machine, VmmProcess, program};
use crate::runner::this_tests_dir;

/// CID of the first concurrent QEMU guest. Each Foreshore guest has CID 3 on its own socket. CIDs
/// of QEMU guests are shared by the whole host.
const FIRST_CID: u32 = 100;

const RUN_LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone)]
pub struct QemuBuilder {
    kernel: Kernel,
    image: Image,
    cpus: u32,
    memory_mib: u64,
    hotplug_mib: u64,
    nvdimm: Option<(PathBuf, u64)>,
    disk: Option<PathBuf>,
    /// Name of the tap. The flag is true if the host's kernel moves its frames.
    tap: Option<(String, bool)>,
    nth: u8,
    cmdline: String,
}

#[derive(Debug)]
pub struct QemuGuest {
    machine: Machine,
    qmp: PathBuf,
}

impl Default for QemuBuilder {
    fn default() -> Self {
        Self {
            kernel: Kernel::V6_12,
            image: Image::Basic,
            cpus: 1,
            memory_mib: 512,
            hotplug_mib: 0,
            nvdimm: None,
            disk: None,
            tap: None,
            nth: 0,
            cmdline: "console=ttyS0 loglevel=5 memhp_default_state=online_movable".to_owned(),
        }
    }
}

impl QemuBuilder {
    pub fn kernel(mut self, kernel: Kernel) -> Self {
        self.kernel = kernel;
        self
    }

    pub fn image(mut self, image: Image) -> Self {
        self.image = image;
        self
    }

    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// Sets the boot memory, and the maximum memory that a virtio-mem device can add.
    pub fn memory_mib(mut self, boot_mib: u64, hotplug_mib: u64) -> Self {
        (self.memory_mib, self.hotplug_mib) = (boot_mib, hotplug_mib);
        self
    }

    pub fn nvdimm(mut self, file: &Path, size_bytes: u64) -> Self {
        self.nvdimm = Some((file.to_owned(), size_bytes));
        self
    }

    pub fn disk(mut self, file: &Path) -> Self {
        self.disk = Some(file.to_owned());
        self
    }

    /// Adds a tap of the host as a virtio-net interface. Creates a missing tap, without an address.
    /// With `vhost`, the host's kernel moves its frames.
    pub fn tap(mut self, name: &str, vhost: bool) -> Self {
        self.tap = Some((name.to_owned(), vhost));
        self
    }

    /// Sets the index of this guest among concurrent guests: 0, 1, and so on.
    pub fn nth(mut self, nth: u8) -> Self {
        self.nth = nth;
        self
    }

    pub fn cmdline(mut self, cmdline: &str) -> Self {
        self.cmdline = cmdline.to_owned();
        self
    }

    pub fn boot(&self) -> Result<QemuGuest> {
        let guest = self.start()?;
        guest.wait_for_shell(BOOT_LIMIT)?;
        Ok(guest)
    }

    pub fn start(&self) -> Result<QemuGuest> {
        let dir = this_tests_dir();
        std::fs::create_dir_all(&dir)
            .with_context(|| format!("Cannot create {}", dir.display()))?;
        let (qmp, console) = (self.file("qmp"), self.console());
        let mut command = Command::new(program("qemu-system-x86_64"));
        command.args(self.arguments(&qmp, &console));
        let log = self.file("log");
        let process = VmmProcess::start(&mut command, &log)?;
        let endpoint = Endpoint::Vhost { cid: self.cid() };
        Ok(QemuGuest { machine: Machine { process, endpoint, console, log }, qmp })
    }

    pub fn console(&self) -> PathBuf {
        self.file("console.log")
    }

    fn file(&self, ending: &str) -> PathBuf {
        this_tests_dir().join(format!("qemu{}.{ending}", self.nth))
    }

    fn cid(&self) -> u32 {
        FIRST_CID + u32::from(self.nth)
    }

    fn arguments(&self, qmp: &Path, console: &Path) -> Vec<String> {
        let nvdimm_mib = self.nvdimm.as_ref().map_or(0, |(_, bytes)| bytes.div_ceil(1 << 20));
        let max_mib = self.memory_mib + self.hotplug_mib + nvdimm_mib + 1024;
        let machine = if self.nvdimm.is_some() { "q35,nvdimm=on" } else { "q35" };
        let mut arguments: Vec<String> = [
            "-nodefaults -display none -no-reboot -accel kvm -cpu host".to_owned(),
            format!(
                "-M {machine} -smp {} -m {},slots=2,maxmem={max_mib}M",
                self.cpus, self.memory_mib
            ),
            format!("-kernel {}", self.kernel.path().display()),
            format!("-initrd {}", self.image.path(self.kernel).display()),
            format!(
                "-serial file:{} -qmp unix:{},server=on,wait=off",
                console.display(),
                qmp.display()
            ),
            format!("-device vhost-vsock-pci,guest-cid={}", self.cid()),
        ]
        .iter()
        .flat_map(|part| part.split(' '))
        .map(str::to_owned)
        .collect();
        if self.hotplug_mib > 0 {
            arguments.extend([
                "-object".to_owned(),
                format!("memory-backend-ram,id=hotplug,size={}M", self.hotplug_mib),
                "-device".to_owned(),
                "virtio-mem-pci,id=vm0,memdev=hotplug,requested-size=0".to_owned(),
            ]);
        }
        if let Some((file, bytes)) = &self.nvdimm {
            arguments.extend([
                "-object".to_owned(),
                format!(
                    "memory-backend-file,id=nv0,share=on,mem-path={},size={bytes}",
                    file.display()
                ),
                "-device".to_owned(),
                "nvdimm,memdev=nv0".to_owned(),
            ]);
        }
        if let Some(file) = &self.disk {
            arguments.extend([
                "-drive".to_owned(),
                format!("file={},if=none,id=d0,format=raw,aio=io_uring", file.display()),
                "-device".to_owned(),
                "virtio-blk-pci,drive=d0".to_owned(),
            ]);
        }
        if let Some((tap, vhost)) = &self.tap {
            let vhost = if *vhost { "on" } else { "off" };
            arguments.extend([
                "-netdev".to_owned(),
                format!("tap,id=n0,ifname={tap},script=no,downscript=no,vhost={vhost}"),
                "-device".to_owned(),
                // No option ROM is needed, because the guest does not boot from the NIC.
                format!("virtio-net-pci,netdev=n0,romfile=,mac=52:54:00:12:34:{:02x}", self.nth),
            ]);
        }
        arguments.extend(["-append".to_owned(), self.cmdline.clone()]);
        arguments
    }
}

impl Deref for QemuGuest {
    type Target = Machine;

    fn deref(&self) -> &Machine {
        &self.machine
    }
}

impl QemuGuest {
    /// Requests a size from the virtio-mem device.
    pub fn request_hotplug_bytes(&self, bytes: u64) -> Result<()> {
        let arguments = json!({ "path": "vm0", "property": "requested-size", "value": bytes });
        self.qmp("qom-set", arguments).map(drop)
    }

    pub fn plugged_bytes(&self) -> Result<u64> {
        let size = self.qmp("qom-get", json!({ "path": "vm0", "property": "size" }))?;
        size.as_u64().with_context(|| format!("The size of vm0 is not a number: {size}"))
    }

    pub fn qmp_socket(&self) -> &Path {
        &self.qmp
    }

    /// Executes one QMP command on a separate connection.
    fn qmp(&self, command: &str, arguments: Value) -> Result<Value> {
        let stream = UnixStream::connect(&self.qmp).context("Cannot connect to QMP")?;
        stream.set_read_timeout(Some(RUN_LIMIT))?;
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let mut answer = || -> Result<Value> {
            loop {
                let line = lines.next().context("QMP closed the connection")??;
                let value: Value = serde_json::from_str(&line)?;
                if value.get("event").is_none() {
                    return Ok(value);
                }
            }
        };
        answer()?;
        for message in [
            json!({ "execute": "qmp_capabilities" }),
            json!({ "execute": command, "arguments": arguments }),
        ] {
            (&stream).write_all(format!("{message}\n").as_bytes())?;
            let value = answer()?;
            if let Some(error) = value.get("error") {
                bail!("QMP {message}: {error}");
            }
            if message["execute"] == command {
                return Ok(value["return"].clone());
            }
        }
        bail!("QMP did not answer {command}")
    }
}
