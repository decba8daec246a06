//! Builds the disk and the initramfs of the emulated host.
//!
//! `initrd` contains busybox and the disk driver. `root.ext4` contains tools, kernel modules, the
//! programs of this repository, and kernels and images for guests.

use std::fs::File;
use std::path::PathBuf;

use anyhow::{Context, Result};

use super::staging::Stage;
use super::trees::{BOOK, EXT4, XFS};
use super::{archive, common_inputs, inputs_key, make_file_system, rebuild};
use crate::apt::Apt;
use crate::cargo::CLIENTS;
use crate::checkout::{Checkout, copy, create_folder, list, lock, remove_folder, rename};
use crate::jobs;
use crate::kernels;
use crate::messages::{report, with_task_name};
use crate::programs;

const FOLDERS: &[&str] = &[
    "dev", "proc", "sys", "tmp", "run", "var", "out", "root", "mnt", "pm", "disk", "peers", "etc",
    "guests", "usr/bin", "usr/sbin",
];
/// Group of `/dev/kvm`. Debian chooses its number when udev is installed.
const KVM_GROUP: u32 = 104;
const MODULES: &str = "\
    kvm_amd virtio_net virtio_rng loop nd_e820 nd_pmem nd_btt dax_pmem device_dax kmem \
    vhost_vsock vhost_net xfs tun bridge";

pub(crate) fn build(checkout: &Checkout) -> Result<()> {
    with_task_name("nested", || {
        let folder = checkout.ci("host");
        for path in [&checkout.ci("guests"), &checkout.ci("host/extra"), &checkout.programs()] {
            create_folder(path)?;
        }
        let _lock = lock(&folder.join("lock"))?;
        let mut inputs = common_inputs(checkout)?;
        inputs.push(checkout.path("ci/nested"));
        rebuild(&folder.join("initrd.key"), &inputs_key(&inputs)?, || build_initrd(checkout))?;
        inputs.extend([checkout.ci("guests"), checkout.ci("host/extra")]);
        inputs.extend(our_programs(checkout)?);
        rebuild(&folder.join("disk.key"), &inputs_key(&inputs)?, || build_disk(checkout))
    })
}

/// Returns the workspace programs that exist, so that a partly built tree still boots.
fn our_programs(checkout: &Checkout) -> Result<Vec<PathBuf>> {
    let mut paths = list(&checkout.programs())?;
    paths.push(checkout.test_programs().join(CLIENTS));
    paths.retain(|path| {
        path.extension().is_none_or(|end| end != "so") && programs::is_program(path)
    });
    Ok(paths)
}

fn build_initrd(checkout: &Checkout) -> Result<()> {
    report!("building the emulated host's initrd");
    let folder = checkout.ci("host");
    let stage = Stage::new(folder.join("initrd.stage"), &["bin", "dev", "root"])?;
    stage.install(&programs::find_system("busybox")?, "bin/busybox")?;
    stage.add_modules(checkout, kernels::DEFAULT, "virtio_blk")?;
    stage.install(&checkout.path("ci/nested/init"), "init")?;
    let new = folder.join("initrd.new");
    jobs::run(archive(stage.folder())?.stdout(File::create(&new)?))?;
    rename(&new, &folder.join("initrd"))?;
    remove_folder(stage.folder())
}

fn build_disk(checkout: &Checkout) -> Result<()> {
    report!("building the emulated host's disk");
    let folder = checkout.ci("host");
    let stage = Stage::new(folder.join("root.stage"), FOLDERS)?;
    stage.add_busybox()?;
    crate::checkout::remove_file(&stage.path("bin/init"))?;
    stage.install(&checkout.path("ci/nested/root-init"), "sbin/init")?;
    stage.add_modules(checkout, kernels::DEFAULT, MODULES)?;
    let mut apt = Apt::new(checkout);
    stage.add_programs(checkout, &mut apt, &EXT4)?;
    stage.add_programs(checkout, &mut apt, &XFS)?;
    stage.add_programs(checkout, &mut apt, &BOOK)?;
    stage.add_names("", &format!("kvm:x:{KVM_GROUP}:\n"))?;
    for pin in kernels::pins(checkout)? {
        copy(&pin.image(checkout)?, &stage.path(&format!("guests/vmlinuz-{}", pin.name)))?;
    }
    add_guest_images(checkout, &stage)?;
    for program in our_programs(checkout)? {
        let name = program
            .file_name()
            .context("path without a file name")?
            .to_str()
            .context("file name is not UTF-8")?;
        stage.install(&program, &format!("usr/bin/{name}"))?;
    }
    let extra = checkout.ci("host/extra");
    jobs::run(programs::system("cp").arg("-a").arg(extra.join(".")).arg(stage.folder()))?;
    // Adds space for ext4 metadata. No space is needed for writing.
    make_file_system(stage.folder(), &folder.join("root.ext4"), |used_kib| used_kib * 9 / 8 + 16384)
}

fn add_guest_images(checkout: &Checkout, stage: &Stage) -> Result<()> {
    let mut images = list(&checkout.ci("guests"))?;
    images.retain(|path| path.extension().is_some_and(|extension| extension == "img"));
    if images.is_empty() {
        report!("no guest images yet (guest/image/build builds them)");
    }
    let add = |image: &PathBuf| {
        copy(
            image,
            &stage.path("guests").join(image.file_name().context("path without a file name")?),
        )
    };
    images.iter().try_for_each(add)
}
