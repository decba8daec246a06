//! Builds a disk with other VMMs for the emulated host, for comparison. It contains this machine's
//! QEMU with its shared objects and firmware, and the static programs listed in `FORESHORE_PEERS`.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::staging::{Stage, shared_objects};
use super::{common_inputs, inputs_key, make_file_system, rebuild};
use crate::checkout::{Checkout, copy, create_folder, lock};
use crate::host::qemu;
use crate::jobs;
use crate::messages::{report, with_task_name};
use crate::programs;

/// Variable with the paths of the programs, separated by colons.
const PEERS: &str = "FORESHORE_PEERS";
const FIRMWARE: [&str; 4] = [
    "/usr/share/seabios/bios-256k.bin",
    "/usr/share/qemu/linuxboot_dma.bin",
    "/usr/share/qemu/pvh.bin",
    "/usr/share/qemu/kvmvapic.bin",
];
const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";
/// Name and content of the script that starts QEMU. The host has no shared objects of its own, so
/// the loader is called with the path of these.
const WRAPPER: (&str, &str) = (
    "bin/qemu-system-x86_64",
    "#!/bin/sh
exec /peers/lib/ld.so --library-path /peers/lib /peers/qemu/qemu-system-x86_64 -L /peers/share \"$@\"
",
);

pub(crate) fn build(checkout: &Checkout) -> Result<()> {
    with_task_name("nested", || {
        let folder = checkout.ci("host");
        create_folder(&folder)?;
        let _lock = lock(&folder.join("peers.lock"))?;
        let qemu = qemu::program()?;
        let inputs = inputs(checkout, &qemu)?;
        let stage = folder.join("peers.stage");
        rebuild(&folder.join("peers.key"), &inputs_key(&inputs)?, || {
            report!("building the disk with the peers");
            let stage = Stage::new(stage, &["bin", "lib", "share", "qemu"])?;
            fill(&stage, &qemu)?;
            make_file_system(stage.folder(), &folder.join("peers.ext4"), |used_kib| {
                used_kib * 21 / 20 + 8192
            })
        })
    })
}

pub(super) fn inputs(checkout: &Checkout, qemu: &Path) -> Result<Vec<PathBuf>> {
    let mut inputs = common_inputs(checkout)?;
    inputs.push(qemu.to_owned());
    inputs.extend(named_peers());
    Ok(inputs)
}

fn named_peers() -> Vec<PathBuf> {
    let named = env::var_os(PEERS).unwrap_or_default();
    env::split_paths(&named).filter(|path| !path.as_os_str().is_empty()).collect()
}

fn fill(stage: &Stage, qemu: &Path) -> Result<()> {
    stage.install(qemu, "qemu/qemu-system-x86_64")?;
    let add = |file: &Path, folder: &str| {
        copy(file, &stage.path(folder).join(file.file_name().context("path without a file name")?))
    };
    let listed = jobs::output(programs::system("ldd").arg(qemu))?;
    shared_objects(&listed).try_for_each(|object| add(object, "lib"))?;
    copy(Path::new(LOADER), &stage.path("lib/ld.so"))?;
    FIRMWARE.iter().try_for_each(|firmware| add(Path::new(firmware), "share"))?;
    stage.write(WRAPPER.0, WRAPPER.1)?;
    named_peers().iter().try_for_each(|peer| add(peer, "bin"))?;
    stage.make_executable(WRAPPER.0)
}
