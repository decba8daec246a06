//! Tests of volumes that are added to a running guest, grow and are removed.

use anyhow::{Result, ensure};
use guest_tests::pool::pmvol;
use guest_tests::{Guest, Pool};
use serde_json::{Value, json};

use crate::hotplug::{LIMIT, builder, remove, wait_for_disk, wait_for_pmem, wait_until_gone};
use crate::pool_media::refused;
use crate::volume::IO_LIMIT;
use crate::zones::MIB;

guest_tests::tests![
    a_thin_volume_comes_grows_and_goes: 300 x 2,
    a_raw_volume_comes_as_pmem_and_goes: 240,
];

fn add(guest: &Guest, pool: &Pool, mut volume: Value) -> Result<Value> {
    volume["pool"] = json!(pool.path());
    guest.put("vm.add-pm-volume", volume)
}

/// Removes a volume's device, and waits until the guest has released it and the volume is closed.
fn remove_volume(guest: &Guest, added: &Value) -> Result<()> {
    let id = added["id"].as_str().unwrap_or_default();
    ensure!(remove(guest, id)? == 204, "vm.remove-device failed");
    wait_until_gone(guest, id, &added["bdf"])?;
    let volumes = guest.get("vm.volumes")?;
    ensure!(volumes["volumes"] == json!([]), "{volumes}");
    Ok(())
}

fn a_thin_volume_comes_grows_and_goes() -> Result<()> {
    let pool = Pool::create("256M")?;
    let guest = builder().boot()?;
    let new = json!({"name": "data", "size": 64 * MIB, "create": true, "thin": true});
    let added = add(&guest, &pool, new.clone())?;
    ensure!(added["id"] == "data", "{added}");
    let node = wait_for_disk(&guest, "data")?;
    let make = format!("mkfs.ext4 -q /dev/{node} && mkdir -p /mnt/d && mount /dev/{node} /mnt/d");
    guest.run_within(IO_LIMIT, &make)?;
    let write = |name: &str, mib: u64| {
        let file = format!("/mnt/d/{name}");
        let write = format!("dd if=/dev/urandom of={file} bs=1M count={mib} && sync");
        guest.run_within(IO_LIMIT, &format!("{write} && sha256sum {file} >>/tmp/sums"))
    };
    write("before", 20)?;
    grows(&guest, &pool, &node)?;
    guest.run_within(IO_LIMIT, &format!("resize2fs /dev/{node}"))?;
    // Does not fit into the old size.
    write("after", 60)?;
    let again = guest.try_put("vm.add-pm-volume", json!({"pool": pool.path(), "name": "data"}))?;
    ensure!(again.status == 400 && again.body.contains("is given twice"), "{again:?}");
    guest.run_within(IO_LIMIT, "umount /mnt/d")?;
    remove_volume(&guest, &added)?;
    for _ in 0..2 {
        let added = add(&guest, &pool, json!({"name": "data"}))?;
        let node = wait_for_disk(&guest, "data")?;
        let check = format!("e2fsck -fn /dev/{node} && mount /dev/{node} /mnt/d");
        guest.run_within(IO_LIMIT, &check)?;
        guest.run_within(IO_LIMIT, "sha256sum -c /tmp/sums && umount /mnt/d")?;
        remove_volume(&guest, &added)?;
    }
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check().map(drop)
}

/// Grows the volume from 64 to 128 MiB while the guest writes to it.
fn grows(guest: &Guest, pool: &Pool, node: &str) -> Result<()> {
    let resize =
        |mib| guest.try_put("vm.resize-disk", json!({"id": "data", "desired_size": mib * MIB}));
    let smaller = resize(32)?;
    ensure!(smaller.status == 400 && smaller.body.contains("cannot shrink"), "{smaller:?}");
    let name = pool.name();
    let growth = ["volume", "resize", &name, "data", "--size", "128M"];
    refused(&growth, &["in use by", "--api-socket"])?;
    let sectors = || -> Result<u64> {
        Ok(guest.run(&format!("cat /sys/block/{node}/size"))?.trim().parse()?)
    };
    let before = sectors()?;
    let writes = "dd if=/dev/urandom of=/mnt/d/during bs=64k count=400 oflag=direct 2>&1";
    let writer = guest.start_script(IO_LIMIT, writes)?;
    let socket = guest.api_socket().display().to_string();
    pmvol(&[&growth[..], &["--api-socket", &socket]].concat())?;
    let output = writer.finish()?.stdout;
    ensure!(!output.contains("error"), "{output}");
    guest.wait_until(
        "the disk has grown",
        LIMIT,
        || Ok((sectors()? - before) * 512 >= 62 * MIB),
    )?;
    let volumes = guest.get("vm.volumes")?;
    let size_bytes = volumes["volumes"][0]["size_bytes"].as_u64();
    ensure!(size_bytes == Some(sectors()? * 512), "{volumes}");
    let config = guest.get("vm.info")?["config"]["pm_volumes"].clone();
    ensure!(config[0]["size"] == 128 * MIB, "{config}");
    Ok(())
}

fn a_raw_volume_comes_as_pmem_and_goes() -> Result<()> {
    let pool = Pool::create("256M")?;
    let guest = builder().boot()?;
    let new = json!({"name": "heap", "size": 64 * MIB, "create": true, "format": "raw"});
    let mut added = add(&guest, &pool, new.clone())?;
    ensure!(added["id"] == "pmem-heap", "{added}");
    let node = wait_for_pmem(&guest)?;
    let write = format!("dd if=/dev/urandom of=/dev/{node} bs=1M count=32 conv=fsync");
    guest.run_within(IO_LIMIT, &format!("{write} && sha256sum /dev/{node} >/tmp/sum"))?;
    let resize = json!({"id": "pmem-heap", "desired_size": 128 * MIB});
    let resized = guest.try_put("vm.resize-disk", resize)?;
    ensure!(resized.status == 400 && resized.body.contains("is mapped"), "{resized:?}");
    for _ in 0..2 {
        remove_volume(&guest, &added)?;
        added = add(&guest, &pool, new.clone())?;
        ensure!(wait_for_pmem(&guest)? == node, "The device's name has changed");
        guest.run_within(IO_LIMIT, "sha256sum -c /tmp/sum")?;
    }
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check().map(drop)
}
