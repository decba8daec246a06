//! Table of the guest images.

use std::fs::File;
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, Result};
use clap::Args;

use super::staging::Stage;
use super::trees::{EXT4, FILE_SYSTEMS, NDCTL, ProgramSet, REDIS, WORKLOADS};
use super::{archive, common_inputs, inputs_key, rebuild};
use crate::apt::Apt;
use crate::checkout::{Checkout, create_folder, lock, remove_folder, rename};
use crate::jobs;
use crate::kernels::{self, Pin};
use crate::messages::{refuse, report, with_task_name};
use crate::programs;

const OWN_PROGRAMS: [&str; 3] = ["foreshore-agent", "guest-shell", "guest-tool"];

const FOLDERS: &[&str] = &[
    "bin", "sbin", "dev", "proc", "sys", "tmp", "run", "root", "mnt", "etc", "usr/bin", "usr/sbin",
    "var/lib", "var/log",
];

const MODULES: &str = "\
    virtio_pci virtio_console virtio_mem virtio_balloon virtio_blk virtio_pmem virtio_rng \
    libnvdimm nfit nd_btt nd_pmem dax_pmem vmw_vsock_virtio_transport lzo-rle zram button evdev \
    virtio_net";
/// Modules that init does not load.
const MODULES_ON_DEMAND: &str = "device_dax pvpanic-pci";
/// Modules that the kernel loads when a file system is mounted.
const FILE_SYSTEM_MODULES: &str = "ext4 xfs f2fs btrfs";

#[derive(Args)]
pub(crate) struct Arguments {
    /// Build these images alone, for example redis-6.12
    images: Vec<String>,
}

/// Kernels for which a flavor has images.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kernels {
    /// All kernels of the cloud flavor.
    Cloud,
    /// All kernels of the generic flavor.
    Generic,
    Default,
}

/// Changes to the basic image.
struct Flavor {
    name: &'static str,
    kernels: Kernels,
    programs: Option<&'static ProgramSet>,
    modules: &'static str,
}

const FLAVORS: [Flavor; 5] = [
    Flavor { name: "basic", kernels: Kernels::Cloud, programs: None, modules: "" },
    Flavor { name: "ndctl", kernels: Kernels::Cloud, programs: Some(&NDCTL), modules: "" },
    Flavor {
        name: "file-systems",
        kernels: Kernels::Generic,
        programs: Some(&FILE_SYSTEMS),
        modules: FILE_SYSTEM_MODULES,
    },
    Flavor { name: "redis", kernels: Kernels::Default, programs: Some(&REDIS), modules: "" },
    Flavor { name: "workloads", kernels: Kernels::Cloud, programs: Some(&WORKLOADS), modules: "" },
];

struct Image {
    flavor: &'static Flavor,
    kernel: String,
}

impl Image {
    fn name(&self) -> String {
        format!("{}-{}", self.flavor.name, self.kernel)
    }

    fn build(&self, checkout: &Checkout, apt: &mut Apt<'_>, key: &str) -> Result<()> {
        let folder = checkout.ci("guests");
        let name = self.name();
        let image = folder.join(format!("{name}.img"));
        let stamp = folder.join(format!("{name}.img.key"));
        if !image.exists() {
            crate::checkout::remove_file(&stamp)?;
        }
        rebuild(&stamp, key, || {
            let stage = Stage::new(folder.join(format!("{name}.stage")), FOLDERS)?;
            self.fill(&stage, checkout, apt)?;
            pack(&stage, &image)?;
            remove_folder(stage.folder())
        })
    }

    fn fill(&self, stage: &Stage, checkout: &Checkout, apt: &mut Apt<'_>) -> Result<()> {
        stage.add_busybox()?;
        let modules = [MODULES, MODULES_ON_DEMAND, self.flavor.modules].join(" ");
        stage.add_modules(checkout, &self.kernel, modules.trim_end())?;
        // One module per line, for modprobe in guest/image/init.
        stage.write("etc/modules", &format!("{}\n", MODULES.replace(' ', "\n")))?;
        stage.install(&checkout.path("guest/image/init"), "init")?;
        // Path that busybox' acpid derives from the power button.
        stage.install(&checkout.path("guest/image/acpi-power"), "etc/acpi/PWRF/00000080")?;
        stage.add_names("redis:x:100:100::/:/bin/sh\n", "redis:x:100:\n")?;
        stage.add_programs(checkout, apt, &EXT4)?;
        for program in built_programs(checkout) {
            let name = program.file_name().context("path without a file name")?;
            let mut strip = programs::system("strip");
            jobs::run(strip.arg("-o").arg(stage.path("usr/bin").join(name)).arg(&program))?;
        }
        if !self.flavor.modules.is_empty() {
            // The kernel runs modprobe to load a file system's module.
            stage.link("/bin/busybox", "sbin/modprobe")?;
        }
        match self.flavor.programs {
            Some(set) => stage.add_programs(checkout, apt, set),
            None => Ok(()),
        }
    }
}

/// Returns all images, in the order in which they are built.
fn images(pins: &[Pin]) -> Vec<Image> {
    let has = |flavor: &Flavor, pin: &Pin| match flavor.kernels {
        Kernels::Cloud => !pin.is_generic(),
        Kernels::Generic => pin.is_generic(),
        Kernels::Default => pin.name == kernels::DEFAULT,
    };
    let of_flavor = |flavor: &'static Flavor| {
        let pins = pins.iter().filter(|pin| has(flavor, pin));
        pins.map(move |pin| Image { flavor, kernel: pin.name.clone() })
    };
    FLAVORS.iter().flat_map(of_flavor).collect()
}

fn built_programs(checkout: &Checkout) -> Vec<PathBuf> {
    let paths = OWN_PROGRAMS.iter().map(|name| checkout.programs().join(name));
    paths.filter(|program| programs::is_program(program)).collect()
}

/// Compresses the staged files to an image. LZ4 unpacks fastest among the formats that all kernels
/// support.
fn pack(stage: &Stage, image: &std::path::Path) -> Result<()> {
    let new = image.with_extension("img.new");
    let mut cpio = archive(stage.folder())?;
    let mut archiver = jobs::spawn(cpio.stdout(Stdio::piped()))?;
    let archive = archiver.child().stdout.take().context("standard output is not piped")?;
    let mut lz4 = programs::system("lz4");
    lz4.args(["-l", "-9", "-q"]).stdin(archive).stdout(File::create(&new)?);
    let mut packer = jobs::spawn(&mut lz4)?;
    // Closes the read end of the pipe in `lz4`. Otherwise, cpio would not notice that the lz4
    // process has failed.
    lz4.stdin(Stdio::null());
    jobs::check(&cpio, archiver.wait()?)?;
    let status = packer.wait()?;
    jobs::check(&lz4, status)?;
    rename(&new, image)?;
    let size = image.metadata()?.len();
    report!(
        "{}: {} KiB",
        image.file_name().context("path without a file name")?.display(),
        size / 1024
    );
    Ok(())
}

pub(crate) fn build(checkout: &Checkout, arguments: &Arguments) -> Result<()> {
    with_task_name("image", || {
        let mut images = images(&kernels::pins(checkout)?);
        let known: Vec<_> = images.iter().map(Image::name).collect();
        if let Some(unknown) = arguments.images.iter().find(|name| !known.contains(name)) {
            refuse!("no image '{unknown}'; there are: {}", known.join(" "));
        }
        if !arguments.images.is_empty() {
            images.retain(|image| arguments.images.contains(&image.name()));
        }
        create_folder(&checkout.ci("guests"))?;
        let _lock = lock(&checkout.ci("guests.lock"))?;
        let mut inputs = common_inputs(checkout)?;
        inputs.push(checkout.path("guest/image"));
        let own_programs = built_programs(checkout);
        for missing in OWN_PROGRAMS
            .iter()
            .filter(|name| !own_programs.iter().any(|program| program.ends_with(name)))
        {
            report!("not built yet, left out: {missing}");
        }
        inputs.extend(own_programs);
        let key = inputs_key(&inputs)?;
        let mut apt = Apt::new(checkout);
        images.iter().try_for_each(|image| image.build(checkout, &mut apt, &key))
    })
}

pub(crate) fn build_named(checkout: &Checkout, names: &[&str]) -> Result<()> {
    build(checkout, &Arguments { images: names.iter().map(|name| (*name).to_owned()).collect() })
}

pub(crate) fn build_all(checkout: &Checkout) -> Result<()> {
    build(checkout, &Arguments { images: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kernel_has_the_images_of_its_flavor() {
        let pins = kernels::pins(&Checkout::new().unwrap()).unwrap();
        let names: Vec<_> = images(&pins).iter().map(Image::name).collect();
        let expected = [
            "basic-6.12",
            "basic-6.1",
            "ndctl-6.12",
            "ndctl-6.1",
            "file-systems-6.12-generic",
            "redis-6.12",
            "workloads-6.12",
            "workloads-6.1",
        ];
        assert_eq!(names, expected);
    }
}
