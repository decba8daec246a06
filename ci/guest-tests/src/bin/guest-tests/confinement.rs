//! Tests of the confinement of a VMM whose devices a stock guest uses.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use escaped_guest::threads::{self, VmmThread};
use guest_tests::Guest;
use guest_tests::disk::sparse_file;
use guest_tests::guest::GuestBuilder;
use guest_tests::pool::Pool;
use guest_tests::runner::{emulated, skip, this_tests_dir};
use guest_tests::user;
use rustix::process::geteuid;
use serde_json::json;

use crate::escaped;
use crate::zones::zone;

guest_tests::tests![
    each_thread_of_a_running_vm_is_confined: 240,
    descriptors_are_those_of_the_devices_and_servers: 240,
    device_with_file_outside_the_limits_is_refused: 240,
    ordinary_user_runs_a_vm_on_a_pool_of_its_own: 240,
    user_without_the_group_of_kvm_is_refused on none,
];

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);

fn builder() -> GuestBuilder {
    Guest::builder().memory("size=384M").pressure("off")
}

/// Returns the names of the VMM's threads, each with its value of `key` (proc(5)).
fn threads(guest: &Guest, key: &str) -> Result<Vec<(String, String)>> {
    let threads = threads::of(guest.pid())?;
    let value = |thread: &VmmThread| Ok((thread.name.clone(), thread.status(key)?.to_owned()));
    threads.iter().map(value).collect()
}

fn each_thread_of_a_running_vm_is_confined() -> Result<()> {
    let disk = sparse_file("disk", 64 * MIB)?;
    let pool = Pool::create("128M")?;
    let events = this_tests_dir().join("events");
    let guest = builder()
        .argument("--disk", &format!("path={}", disk.display()))
        .pm_volume(&format!("pool={},name=data,size=64M,create=on", pool.path().display()))
        .argument("--event-monitor", &format!("path={}", events.display()))
        .boot()?;
    // A request to the API and a scrape start the threads of the servers.
    guest.get("vm.info")?;
    guest.metrics()?;
    // Mode 2 of seccomp(2) is a filter.
    for (key, expected) in [("Seccomp", "2"), ("NoNewPrivs", "1")] {
        for (name, value) in threads(&guest, key)? {
            ensure!(value == expected, "{key} of thread {name} is {value}");
        }
    }
    // vCPUs have one filter, and so have the threads that build VMs, end devices and start vCPUs.
    // The others have added their own.
    for (name, filters) in threads(&guest, "Seccomp_filters")? {
        let has_one = ["foreshore", "_removed"].contains(&&*name) || name.contains("vcpu");
        let filters: u32 = filters.parse()?;
        ensure!(if has_one { filters == 1 } else { filters >= 2 }, "{name} has {filters} filters");
    }
    let names: BTreeSet<_> = threads(&guest, "Name")?.into_iter().map(|(name, _)| name).collect();
    for kind in ["_api", "vcpu0", "_device", "_vsock", "_mem", "_disk0_q0", "_events"] {
        ensure!(names.contains(kind), "{kind} is not among {names:?}");
    }
    ensure!(guest.metric("foreshore_seccomp_enabled", &[])? == 1.0);
    ensure!(guest.metric("foreshore_landlock_enabled", &[])? == 1.0);
    guest.no_kernel_complaints()
}

/// Returns the open descriptors of a process by access and kind, for example `rw /dev/net/tun`.
fn descriptors(pid: u32) -> Result<BTreeSet<String>> {
    let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}"));
    let (unix, tcp) = (read("net/unix")?, read("net/tcp")?);
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        let number = path.file_name().context("a descriptor")?.display().to_string();
        // A descriptor may be closed while its files are read.
        let (Ok(target), Ok(info)) = (fs::read_link(&path), read(&format!("fdinfo/{number}")))
        else {
            continue;
        };
        let target = target.display().to_string();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:\t"));
        let flags = i32::from_str_radix(flags.context("no flags")?, 8)?;
        // The event-manager crate creates eventfds without FD_CLOEXEC. No thread may execute a
        // program, which would inherit them.
        let is_inheritable = number.parse::<u32>()? < 3 || target == "anon_inode:[eventfd]";
        ensure!(
            is_inheritable || flags & libc::O_CLOEXEC != 0,
            "a program would inherit descriptor {number}: {target}"
        );
        let access = match flags & libc::O_ACCMODE {
            libc::O_RDONLY => "r",
            libc::O_WRONLY => "w",
            _ => "rw",
        };
        let inode = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'));
        let kind = inode.map_or(target.clone(), |inode| socket_kind(inode, &unix, &tcp));
        found.insert(format!("{access} {kind}"));
    }
    Ok(found)
}

/// Returns the kind of a socket by its row in the tables /proc/PID/net/unix and /proc/PID/net/tcp
/// (proc(5)).
fn socket_kind(inode: &str, unix: &str, tcp: &str) -> String {
    const LISTENS: &str = "00010000";
    const TCP_LISTENS: &str = "0A";
    let row = |table: &str, column: usize| {
        let rows = table.lines().map(|row| row.split_ascii_whitespace().collect::<Vec<_>>());
        let mut rows = rows.filter(|fields| fields.get(column) == Some(&inode));
        rows.next().map(|fields| fields.into_iter().map(str::to_owned).collect::<Vec<_>>())
    };
    match (row(unix, 6), row(tcp, 9)) {
        (Some(fields), _) if fields[3] == LISTENS => {
            format!("Unix socket, listens at {}", fields[7])
        }
        (Some(_), _) => "Unix socket, connected".to_owned(),
        (None, Some(fields)) if fields[3] == TCP_LISTENS => "TCP socket, listens".to_owned(),
        (None, Some(_)) => "TCP socket, connected".to_owned(),
        (None, None) => format!("socket of another family: {inode}"),
    }
}

fn descriptors_are_those_of_the_devices_and_servers() -> Result<()> {
    let guest = escaped::builder()?.name("all").boot()?;
    let found = descriptors(guest.pid())?;
    let folder = this_tests_dir();
    let file = |access: &str, name: &str| format!("{access} {}", folder.join(name).display());
    let listens = |name: &str| file("rw Unix socket, listens at", name);
    let expected = BTreeSet::from([
        "r /dev/null".to_owned(),
        "r /dev/urandom".to_owned(),
        // Standard output and error.
        file("w", "all0.vmm.log"),
        file("w", "all0.api.lock"),
        file("w", "all0.vsock.lock"),
        listens("all0.api"),
        listens("all0.vsock"),
        "rw TCP socket, listens".to_owned(),
        "rw Unix socket, connected".to_owned(),
        file("w", "events"),
        file("w", "all0.console.log"),
        file("rw", "disk"),
        file("rw", "pool"),
        // Kept for later VMs: this process may not be able to open it again.
        "rw /dev/kvm".to_owned(),
        "rw /dev/userfaultfd".to_owned(),
        "rw /dev/net/tun".to_owned(),
        "rw anon_inode:[eventfd]".to_owned(),
        "rw anon_inode:[eventpoll]".to_owned(),
        "rw anon_inode:[io_uring]".to_owned(),
        "rw anon_inode:[timerfd]".to_owned(),
        "r anon_inode:[userfaultfd]".to_owned(),
        "rw anon_inode:kvm-vm".to_owned(),
        "rw anon_inode:kvm-vcpu:0".to_owned(),
    ]);
    ensure!(found == expected, "{found:#?} instead of {expected:#?}");
    Ok(())
}

fn device_with_file_outside_the_limits_is_refused() -> Result<()> {
    // The folder of the VM's sockets and console is within the limits.
    let inside = sparse_file("inside", 64 * MIB)?;
    let folder = std::env::temp_dir().join("outside-the-limits");
    fs::create_dir_all(&folder)?;
    let outside = folder.join("image");
    fs::File::create(&outside)?.set_len(64 * MIB)?;
    let disk = json!({"path": outside, "id": "outside"});
    {
        let guest = builder().boot()?;
        let refused = guest.try_put("vm.add-disk", disk.clone())?;
        let rule = format!("--landlock-rules path={},access=rw", folder.display());
        ensure!(refused.status == 400 && refused.body.contains(&rule), "{refused:?}");
        guest.put("vm.add-disk", json!({"path": inside, "id": "inside"}))?;
        ensure!(guest.metric("foreshore_landlock_enabled", &[])? == 1.0);
    }
    // Without the limits, and with a rule, the same request succeeds.
    let rule = format!("path={},access=rw", folder.display());
    for (arguments, enabled) in
        [(["--landlock", "off"], 0.0), (["--landlock-rules", rule.as_str()], 1.0)]
    {
        let guest = builder().words(arguments).boot()?;
        guest.put("vm.add-disk", disk.clone())?;
        ensure!(guest.metric("foreshore_landlock_enabled", &[])? == enabled);
    }
    Ok(())
}

fn ordinary_user_runs_a_vm_on_a_pool_of_its_own() -> Result<()> {
    if geteuid().is_root() {
        user::become_ordinary(true)?;
    }
    let uid = geteuid().as_raw();
    let pool = Pool::create("384M")?;
    // Only root can add to the folder of unpacked kernels.
    let guest = builder()
        .packed_kernel()
        .pm_volume(&format!("pool={},name=data,size=64M,create=on", pool.name()))
        .pm_memory(&format!("pool={},size=128M", pool.name()))
        .pressure("fixed,size=128M")
        .boot()?;
    guest.wait_until("the guest has PM as memory", LIMIT, || {
        Ok(zone(&guest, "pm")?.plugged_bytes == 128 * MIB)
    })?;
    // The thin volume is not mapped, because only root may open /dev/userfaultfd.
    let volumes = guest.get("vm.volumes")?;
    ensure!(volumes["volumes"][0]["interface"] == "virtio-blk", "{volumes}");
    guest.run("guest-tool write-blocks /dev/vda direct 0 100 1 1")?;
    guest.run("guest-tool check-blocks /dev/vda 0 100 1 1")?;
    let ids = vec![uid.to_string(); 4].join("\t");
    let none = "0000000000000000";
    for (key, expected) in [("Uid", ids.as_str()), ("CapEff", none), ("Seccomp", "2")] {
        for (name, value) in threads(&guest, key)? {
            ensure!(value == expected, "{key} of thread {name} is {value}");
        }
    }
    for entry in fs::read_dir(this_tests_dir())? {
        let entry = entry?;
        // The runner has created the file of the test's output.
        let (name, owner) = (entry.file_name(), entry.metadata()?.uid());
        ensure!(name == "output" || owner == uid, "{name:?} belongs to user {owner}");
    }
    for path in [pool.path(), &guest.api_socket(), &guest.vsock_socket(), &guest.console_file()] {
        ensure!(path.exists(), "{} is missing", path.display());
    }
    guest.no_kernel_complaints()
}

fn user_without_the_group_of_kvm_is_refused() -> Result<()> {
    if fs::metadata("/dev/kvm")?.mode() & 0o006 != 0 && !emulated() {
        return skip("all users of this host may open /dev/kvm");
    }
    user::become_ordinary(false)?;
    let refused = builder().packed_kernel().expect_refusal()?.message;
    let user = user::ORDINARY;
    let expected = format!(
        "foreshore: cannot boot the VM: cannot open /dev/kvm as user {user}; add the user to the \
         group of the device, usually kvm: Permission denied (os error 13)\n"
    );
    ensure!(refused == expected, "{refused}");
    Ok(())
}
