//! Tests of several NVDIMMs in one VM, with the guest's own tools.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use guest_tests::disk::{LimitedTmpfs, LoopDevice};
use guest_tests::pool::{create_keys, pmvol};
use guest_tests::{Guest, GuestBuilder, Image, Pool};
use serde_json::Value;

use crate::volume::IO_LIMIT;

guest_tests::tests![
    several_nvdimms_are_found_in_their_order: 300 on [V6_12, V6_1 extended] x 2,
    a_pool_that_has_failed_is_an_nvdimm_in_critical_health: 300,
    maximum_number_of_nvdimms_is_found: 600 (extended) x 2,
];

/// Sizes of the NVDIMMs. They differ, so that a size identifies an NVDIMM.
const SIZES_MIB: [u64; 4] = [24, 20, 32, 28];
const MIB: u64 = 1 << 20;

fn guest_with_nvdimms(pool: &Pool) -> GuestBuilder {
    let builder = Guest::builder().memory("size=384M").pressure("off").image(Image::Ndctl);
    (0..SIZES_MIB.len()).fold(builder, |builder, number| {
        builder.pm_volume(&format!("pool={},name=volume{number},interface=nvdimm", pool.name()))
    })
}

fn ndctl(guest: &Guest, flags: &str) -> Result<Vec<Value>> {
    let text = guest.run_within(IO_LIMIT, &format!("ndctl list {flags}"))?;
    match serde_json::from_str(&text)
        .with_context(|| format!("Unexpected output of ndctl list {flags}: {text:?}"))?
    {
        Value::Array(list) => Ok(list),
        one @ Value::Object(_) => Ok(vec![one]),
        other => bail!("Unexpected output of ndctl list {flags}: {other}"),
    }
}

fn wait_for_disks(guest: &Guest, count: usize) -> Result<()> {
    let tests: Vec<_> = (0..count).map(|number| format!("test -b /dev/pmem{number}s")).collect();
    guest.wait_until_run("all disks exist", IO_LIMIT, &tests.join(" && "))
}

fn by_name(list: &[Value]) -> BTreeMap<String, &Value> {
    list.iter().filter_map(|value| Some((value["dev"].as_str()?.to_owned(), value))).collect()
}

fn several_nvdimms_are_found_in_their_order() -> Result<()> {
    let pool = Pool::create("256M")?;
    for (number, size_mib) in SIZES_MIB.into_iter().enumerate() {
        pool.create_volume(&format!("volume{number}"), &format!("{size_mib}M"))?;
    }
    let guest = guest_with_nvdimms(&pool).boot()?;
    wait_for_disks(&guest, SIZES_MIB.len())?;

    // 1. Each NVDIMM has a region, in the order of the flags, and a DIMM.
    let regions = ndctl(&guest, "-R")?;
    let regions = by_name(&regions);
    ensure!(regions.len() == SIZES_MIB.len(), "{regions:?}");
    for (number, size_mib) in SIZES_MIB.into_iter().enumerate() {
        let region =
            regions.get(&format!("region{number}")).with_context(|| format!("{regions:?}"))?;
        ensure!(
            region["size"] == size_mib * MIB && region["type"] == "pmem",
            "Region {number}: {region}"
        );
        ensure!(region["available_size"] == 0, "Region {number} has space left: {region}");
    }

    // 2. Every namespace covers its region and has the pool's BTT.
    let namespaces = ndctl(&guest, "-N")?;
    for (number, namespace) in (0..).zip(&by_name(&namespaces)) {
        let (name, namespace) = namespace;
        ensure!(
            *name == format!("namespace{number}.0") && namespace["mode"] == "sector",
            "{namespace}"
        );
        ensure!(namespace["blockdev"] == format!("pmem{number}s"), "{namespace}");
    }
    ensure!(namespaces.len() == SIZES_MIB.len(), "{namespaces:?}");

    // 3. Each DIMM has a health and a handle, and no DIMM has labels.
    let dimms = ndctl(&guest, "-DH")?;
    ensure!(dimms.len() == SIZES_MIB.len(), "{dimms:?}");
    let mut handles: Vec<_> = dimms.iter().filter_map(|dimm| dimm["handle"].as_u64()).collect();
    handles.sort_unstable();
    ensure!(handles == [1, 2, 3, 4], "{dimms:?}");
    for dimm in &dimms {
        ensure!(dimm["health"]["health_state"] == "ok", "{dimm}");
    }
    let labels =
        guest.try_run(IO_LIMIT, "ndctl read-labels nmem0 2>&1 | grep -c NAMESPACE_INDEX")?;
    ensure!(labels.stdout.trim() == "0", "The DIMMs have labels: {labels:?}");

    // 4. The NVDIMMs are distinct, and keep the written data.
    for number in 0..SIZES_MIB.len() {
        guest.run_within(
            IO_LIMIT,
            &format!("guest-tool write-blocks /dev/pmem{number}s direct 0 50 {number} 1"),
        )?;
    }
    for number in 0..SIZES_MIB.len() {
        guest.run_within(
            IO_LIMIT,
            &format!("guest-tool check-blocks /dev/pmem{number}s 0 50 {number} 1"),
        )?;
    }
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check().map(drop)
}

/// Value of `memory::layout::MAX_NVDIMMS` in the VMM.
const MAX_NVDIMMS: usize = 64;

fn maximum_number_of_nvdimms_is_found() -> Result<()> {
    let pool = Pool::create("1600M")?;
    let builder = Guest::builder().memory("size=512M").pressure("off").image(Image::Ndctl);
    let guest = (0..MAX_NVDIMMS)
        .fold(builder, |builder, number| {
            let volume = format!("name=volume{number},size=20M,{}", create_keys());
            builder.pm_volume(&format!("pool={},{volume},interface=nvdimm", pool.name()))
        })
        .boot()?;
    wait_for_disks(&guest, MAX_NVDIMMS)?;
    ensure!(
        ndctl(&guest, "-R")?.len() == MAX_NVDIMMS && ndctl(&guest, "-N")?.len() == MAX_NVDIMMS,
        "Not all DIMMs are listed"
    );
    let dimms = ndctl(&guest, "-DH")?;
    let ok = dimms.iter().filter(|dimm| dimm["health"]["health_state"] == "ok");
    ensure!(ok.count() == MAX_NVDIMMS, "{dimms:?}");
    for verb in ["write-blocks /dev/pmem${n}s direct", "check-blocks /dev/pmem${n}s"] {
        let each = format!(
            "for n in $(seq 0 {}); do guest-tool {verb} 0 8 $n 1 || exit 1; done",
            MAX_NVDIMMS - 1
        );
        guest.run_within(IO_LIMIT, &each)?;
    }
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check().map(drop)
}

/// A failed flush of an NVDIMM would pause the VM. A failed flush of a virtio-pmem device on the
/// same pool does not pause it, but the NVDIMM then reports critical health.
fn a_pool_that_has_failed_is_an_nvdimm_in_critical_health() -> Result<()> {
    let tmpfs = LimitedTmpfs::create(160)?;
    let device = LoopDevice::create_in(tmpfs.dir(), 128)?;
    let pool = Pool::by_path(device.path());
    pmvol(&["create", &pool.name()])?;
    pool.create_volume("dimm", "24M")?;
    pool.create_volume("pmem", "24M")?;
    device.dig_holes()?;
    let guest = Guest::builder()
        .memory("size=384M")
        .pressure("off")
        .image(Image::Ndctl)
        .pm_volume(&format!("pool={},name=dimm,interface=nvdimm", pool.name()))
        .pm_volume(&format!("pool={},name=pmem,interface=virtio-pmem", pool.name()))
        .boot()?;
    wait_for_disks(&guest, 2)?;
    let health = || -> Result<Value> {
        let dimms = ndctl(&guest, "-DH")?;
        let [dimm] = dimms.as_slice() else { bail!("Not exactly one DIMM: {dimms:?}") };
        Ok(dimm["health"]["health_state"].clone())
    };
    ensure!(health()? == "ok", "{}", health()?);
    tmpfs.fill_up()?;
    // The NFIT describes the NVDIMM's region. The writes go to the other disk.
    let find = "for region in /sys/bus/nd/devices/region*; do \
        case $(readlink -f $region) in *virtio*) echo /dev/pmem${region##*region}s ;; esac; done";
    let disk = guest.run(find)?;
    let write = format!("guest-tool write-blocks {} direct 0 2000 1 1", disk.trim());
    let output = guest.try_run(IO_LIMIT, &write)?;
    ensure!(output.code != 0, "A write that cannot be made durable succeeded");
    ensure!(health()? == "critical", "{}", health()?);
    let states = guest.get("vm.volumes")?;
    for number in 0..2 {
        ensure!(states["volumes"][number]["status"]["state"] == "failed", "{states}");
    }
    ensure!(guest.get("vm.info")?["state"] == "Running", "The VM does not run");
    Ok(())
}
