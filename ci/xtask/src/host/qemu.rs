//! Command line of the QEMU that emulates the host.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::Arguments;
use super::nested::NVDIMM_FILE_MIB;
use crate::programs::{self, user_path};

/// Serial ports of the host whose output QEMU writes to files of these names.
const OUTPUTS: [&str; 4] = ["stdout", "stderr", "out", "exit"];

/// Features of the emulated CPU. XSAVE is disabled because of QEMU 7.2: in a guest of the emulated
/// host, CPUID leaf 0xd does not follow XCR0. With any VMM, the guest's kernel then warns at boot
/// ("XSAVE consistency problem").
const CPU: &str = "EPYC,+svm,+npt,-xsave,-xsaveopt,-xsavec,-xgetbv1,-avx,-avx2,-f16c,-fma";

/// Folders with QEMU's modules and firmware. A patched QEMU would look for them next to itself.
pub(crate) const MODULES: (&str, &str) = ("QEMU_MODULE_DIR", "/usr/lib/x86_64-linux-gnu/qemu");
const FIRMWARE: [&str; 3] = ["/usr/share/qemu", "/usr/share/seabios", "/usr/lib/ipxe/qemu"];

/// Command line options for the host's kernel.
const KERNEL_OPTIONS: [&str; 11] = [
    "console=ttyS0",
    "panic=-1",
    "quiet",
    "mitigations=off",
    "random.trust_cpu=on",
    // On a busy machine, the kernel receives too few timer interrupts and panics ("IO-APIC + timer
    // doesn't work").
    "no_timer_check",
    // An oops must end the host, because results from a damaged kernel are not valid. Only the
    // heartbeat sends an NMI.
    "oops=panic",
    "unknown_nmi_panic",
    // A multi-threaded QEMU 7.2 may miss that a kernel patches its own text: a CPU may keep
    // executing the temporary breakpoint. Therefore, the kernel boots on one CPU. It patches little
    // after root-init has started the other CPUs. A trusted TSC prevents a patch for another clock
    // source.
    "maxcpus=1",
    "noreplace-smp",
    "tsc=reliable",
];

/// Memory below 4 GiB of a q35 machine that also has memory above.
const BELOW_4G_MIB: u64 = 2048;
const FOUR_GIB_MIB: u64 = 4096;

/// Returns this machine's QEMU, which the user may have installed.
pub(crate) fn program() -> Result<PathBuf> {
    let found = programs::find("qemu-system-x86_64", user_path());
    found.context("qemu-system-x86_64 is not installed (ci/setup installs it)")
}

pub(crate) struct Files<'run> {
    pub kernel: &'run Path,
    pub initrd: &'run Path,
    /// Folder of this run, with disks, pipes and outputs.
    pub run: &'run Path,
}

pub(crate) fn arguments(host: &Arguments, files: &Files<'_>) -> Vec<String> {
    let mut list = List(Vec::new());
    let memory = Memory::new(host);
    list.add(["-nodefaults", "-no-reboot", "-display", "none"]);
    add_pace(&mut list, host);
    list.add(["-cpu", CPU, "-smp", &host.cpus.to_string()]);
    let (kernel, initrd) = (files.kernel.display().to_string(), files.initrd.display().to_string());
    let options = [&KERNEL_OPTIONS.join(" "), &memory.kernel_options[..]].concat();
    list.add(["-kernel", &kernel, "-initrd", &initrd, "-append", &options]);
    let in_run = |name: &str| files.run.join(name).display().to_string();
    list.add(["-serial", &format!("file:{}", in_run("console.log"))]);
    // This log shows triple faults of CPUs. QEMU handles a triple fault like any other restart.
    list.add(["-d", "cpu_reset", "-D", &in_run("resets.log")]);
    add_disks(&mut list, host, &in_run);
    add_network(&mut list, host);
    list.add(["-device", "virtio-rng-pci"]);
    add_ports(&mut list, &in_run);
    memory.add(&mut list, host);
    list.0
}

struct List(Vec<String>);

impl List {
    fn add<const N: usize>(&mut self, arguments: [&str; N]) {
        self.0.extend(arguments.map(str::to_owned));
    }

    /// Adds a virtio disk. The host names its disks in the order in which they are added.
    fn add_disk(&mut self, name: &str, options: &str, file: &str) {
        self.add(["-drive", &format!("if=none,id={name},format=raw,{options},file={file}")]);
        self.add(["-device", &format!("virtio-blk-pci,drive={name}")]);
    }
}

fn add_pace(list: &mut List, host: &Arguments) {
    if host.counted {
        // When all CPUs are idle, the clock jumps to the next timer.
        list.add(["-accel", "tcg,thread=single,tb-size=512", "-icount", "shift=0,sleep=off"]);
    } else {
        list.add(["-accel", "tcg,thread=multi,tb-size=512"]);
    }
    FIRMWARE.iter().for_each(|folder| list.add(["-L", folder]));
}

fn add_disks(list: &mut List, host: &Arguments, in_run: &dyn Fn(&str) -> String) {
    list.add_disk("root", "readonly=on,file.locking=off", &in_run("root.ext4"));
    list.add_disk("job", "readonly=on", &in_run("job.tar"));
    if host.peers {
        list.add_disk("peers", "readonly=on,file.locking=off", &in_run("peers.ext4"));
    }
    if let Some(disk) = &host.disk {
        // A flush writes data to the file. Unflushed data is in the host's page cache, which is
        // part of QEMU's memory and is lost with it.
        list.add_disk("disk", "cache=writeback", &disk.display().to_string());
    }
}

fn add_network(list: &mut List, host: &Arguments) {
    let forward = |(host_port, guest_port): &(u16, u16)| {
        format!(",hostfwd=tcp:127.0.0.1:{host_port}-:{guest_port}")
    };
    let forwards: String = host.forwards.iter().map(forward).collect();
    list.add([
        "-netdev",
        &format!("user,id=net0{forwards}"),
        "-device",
        "virtio-net-pci,netdev=net0,romfile=",
    ]);
}

/// Adds serial ports for the job's output, its exit code and the heartbeat, and adds the monitor.
fn add_ports(list: &mut List, in_run: &dyn Fn(&str) -> String) {
    list.add([
        "-chardev",
        &format!("pipe,id=monitor,path={}", in_run("monitor")),
        "-mon",
        "chardev=monitor",
    ]);
    // Without ioeventfd, data written to a port is in its file before the writer continues, so a
    // power-off loses nothing.
    list.add(["-device", "virtio-serial-pci,ioeventfd=off"]);
    for (number, port) in (1..).zip(OUTPUTS) {
        list.add(["-chardev", &format!("file,id={port},path={}", in_run(port))]);
        list.add(["-device", &format!("virtserialport,chardev={port},name={port},nr={number}")]);
    }
    let number = OUTPUTS.len() + 1;
    list.add(["-chardev", &format!("pipe,id=beat,path={}", in_run("beat"))]);
    list.add(["-device", &format!("virtserialport,chardev=beat,name=beat,nr={number}")]);
}

/// Memory layout of the host, including persistent memory.
struct Memory {
    /// Total size, without an NVDIMM in a file.
    size_mib: u64,
    /// Kernel options that reserve persistent memory, each with a leading space.
    kernel_options: String,
}

impl Memory {
    fn new(host: &Arguments) -> Self {
        let mut memory = Self { size_mib: host.memory_mib.into(), kernel_options: String::new() };
        if let Some(nvdimm_mib) = host.nvdimm_mib.map(u64::from) {
            // The first memory above 4 GiB becomes persistent memory as firmware would report it.
            // It has struct pages and so supports DAX. An emulated NVDIMM without labels does not
            // have them.
            memory.set_apart(nvdimm_mib, "4G");
            memory.size_mib += nvdimm_mib;
            if let Some(pmem_mib) = host.pmem_mib.map(u64::from) {
                // Two ranges after the first. The kernel creates a region for each.
                for start in [FOUR_GIB_MIB + nvdimm_mib, FOUR_GIB_MIB + nvdimm_mib + pmem_mib] {
                    memory.set_apart(pmem_mib, &format!("{start}M"));
                    memory.size_mib += pmem_mib;
                }
            }
        }
        if host.nvdimm_file.is_some() {
            memory.set_apart(
                NVDIMM_FILE_MIB,
                &format!("{}M", FOUR_GIB_MIB + memory.size_mib - BELOW_4G_MIB),
            );
        }
        memory
    }

    fn set_apart(&mut self, size_mib: u64, start: &str) {
        self.kernel_options += &format!(" memmap={size_mib}M!{start}");
    }

    fn add(&self, list: &mut List, host: &Arguments) {
        let size_mib = self.size_mib;
        let preallocated = if host.prealloc { ",prealloc=on" } else { "" };
        let backend = format!("memory-backend-ram,id=ram,size={size_mib}M{preallocated}");
        if let Some(file) = &host.nvdimm_file {
            // The file is memory of a separate NUMA node, which is the last one. The kernel options
            // override the firmware's report.
            let file = format!(
                "memory-backend-file,id=nvdimm,share=on,mem-path={},size={NVDIMM_FILE_MIB}M",
                file.display()
            );
            list.add(["-object", &backend, "-numa", "node,nodeid=0,memdev=ram"]);
            list.add(["-object", &file, "-numa", "node,nodeid=1,memdev=nvdimm"]);
            list.add(["-m", &(size_mib + NVDIMM_FILE_MIB).to_string(), "-M", "q35"]);
        } else if host.prealloc {
            list.add(["-object", &backend]);
            list.add(["-m", &size_mib.to_string(), "-M", "q35,memory-backend=ram"]);
        } else {
            list.add(["-m", &size_mib.to_string(), "-M", "q35"]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tests::parse;

    fn line(options: &str) -> String {
        let host = parse(&format!("{options} -- command")).unwrap();
        let files = Files {
            kernel: Path::new("/boot/vmlinuz"),
            initrd: Path::new("/initrd"),
            run: Path::new("/run/host.1"),
        };
        arguments(&host, &files).join(" ")
    }

    #[test]
    fn plain_host_has_two_disks_and_its_memory() {
        let line = line("--cpus 1 --forward 80:8080 --forward 1:2");
        for part in [
            "-accel tcg,thread=multi,tb-size=512",
            "-smp 1",
            "maxcpus=1 noreplace-smp tsc=reliable -serial file:/run/host.1/console.log",
            "id=job,format=raw,readonly=on,file=/run/host.1/job.tar",
            "user,id=net0,hostfwd=tcp:127.0.0.1:80-:8080,hostfwd=tcp:127.0.0.1:1-:2",
            "chardev=beat,name=beat,nr=5",
            "-m 4096 -M q35",
        ] {
            assert!(line.contains(part), "{part}: {line}");
        }
        for part in ["peers", "id=disk", "memmap", "-icount", "-object"] {
            assert!(!line.contains(part), "{part}: {line}");
        }
    }

    #[test]
    fn persistent_memories_follow_each_other_above_4_gib() {
        let line = line("--mem 3072 --nvdimm 512 --pmem-devices 320");
        assert!(line.contains(" memmap=512M!4G memmap=320M!4608M memmap=320M!4928M "), "{line}");
        assert!(line.ends_with("-m 4224 -M q35"), "{line}");
    }

    #[test]
    fn nvdimm_in_a_file_is_the_last_memory() {
        let line = line("--mem 3072 --nvdimm-file /n --disk /d --peers");
        assert!(line.contains(" memmap=256M!5120M "), "{line}");
        assert!(line.contains("id=nvdimm,share=on,mem-path=/n,size=256M"), "{line}");
        assert!(line.ends_with("-m 3328 -M q35"), "{line}");
        // The host names its disks by their order.
        let position = |disk: &str| line.find(&format!("virtio-blk-pci,drive={disk}")).unwrap();
        assert!(["root", "job", "peers", "disk"].map(position).is_sorted());
    }

    #[test]
    fn counted_host_runs_on_one_thread_with_its_memory_allocated() {
        let line = line("--cpus 1 --counted --prealloc");
        assert!(
            line.contains("-accel tcg,thread=single,tb-size=512 -icount shift=0,sleep=off"),
            "{line}"
        );
        assert!(
            line.contains("memory-backend-ram,id=ram,size=4096M,prealloc=on -m 4096"),
            "{line}"
        );
    }
}
