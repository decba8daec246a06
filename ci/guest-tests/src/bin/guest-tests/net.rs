//! Tests of `--net`: tap interfaces of the host as virtio-net devices, with Debian's stock driver.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::guest::{GuestBuilder, Script};
use guest_tests::host::{self, Bridge, load_modules};
use guest_tests::http::{self, Response};
use guest_tests::runner::skip;
use guest_tests::user::need_root;
use guest_tests::{BOOT_LIMIT, Guest, Kernel, tap};
use serde_json::{Value, json};

use crate::api;

guest_tests::tests![
    a_guest_and_its_host_talk_over_a_tap: 300 (long) on [V6_12, V6_1 extended],
    frames_pass_without_offloads_and_with_small_rings: 300 (extended),
    several_queues_are_used: 300 (long) x 2,
    two_guests_talk_over_a_bridge_before_and_after_a_reboot: 420 (extended) on [V6_12 & V6_1],
    a_tap_that_goes_away_is_a_link_that_is_down: 180 (long),
    interfaces_other_than_taps_are_refused: 180,
    passed_queues_work_from_the_first_boot_to_their_removal: 420 (extended),
    an_interface_comes_carries_traffic_and_goes: 300 on [V6_12, V6_1 extended],
    a_nic_without_the_bus_is_silent_until_its_driver_comes_back: 300 (long),
];

pub(crate) const IO_LIMIT: Duration = Duration::from_secs(120);
/// Length of a stream. Its segments have 20 KiB on average, so a queue of 256 descriptors is used
/// more than once.
pub(crate) const TRANSFER_BYTES: usize = 8 << 20;
/// Longest frame with an MTU of 1500, without the virtio header.
const FRAME_BYTES: f64 = 1514.0;
/// Upper limit of a transfer whose length depends on the host's speed. The guest stores the bytes
/// in /tmp, which is in its 384 MiB of memory.
const MAX_TRANSFER_BYTES: usize = 64 << 20;
/// Line that `yes` repeats to produce a stream.
const LINE: &[u8] = b"0123456789abcdefghijklmnopqrstuvwxyz\n";

/// Addresses of a guest and of the tap on its host.
pub(crate) struct Net {
    pub tap: String,
    pub host: Ipv4Addr,
    pub guest: Ipv4Addr,
}

impl Net {
    pub(crate) fn set_up_host(&self) -> Result<()> {
        let Self { tap, host, .. } = self;
        host::run(&format!("ip addr add {host}/24 dev {tap} && ip link set {tap} up"))
    }

    pub(crate) fn set_up_guest(&self, guest: &Guest, interface: &str) -> Result<()> {
        bring_up_as(guest, interface, self.guest)?;
        ping_host(guest, self)
    }

    /// Opens the test's own tap. It exists while any of its queues is open.
    fn open(&self, queues: usize) -> Result<Vec<File>> {
        let files = tap::open(&self.tap, queues)?;
        self.set_up_host()?;
        Ok(files)
    }

    pub(crate) fn exists(&self) -> bool {
        Path::new("/sys/class/net").join(&self.tap).exists()
    }

    /// Returns a network. Its tap and addresses contain the number `nth`, which differs between
    /// tests. Skips the test on a host without tap interfaces.
    pub(crate) fn new(nth: u8) -> Result<Self> {
        need_tun()?;
        let address = |last| Ipv4Addr::new(172, 30, nth, last);
        Ok(Self { tap: format!("fstap{nth}"), host: address(1), guest: address(2) })
    }

    pub(crate) fn option(&self, more: &str) -> String {
        let Self { tap, host, .. } = self;
        format!("tap={tap},ip={host},mask=255.255.255.0,mac=02:f5:00:00:00:01{more}")
    }

    pub(crate) fn builder(&self, more: &str) -> GuestBuilder {
        Guest::builder().memory("size=384M").pressure("off").argument("--net", &self.option(more))
    }

    pub(crate) fn bring_up(&self, guest: &Guest) -> Result<()> {
        bring_up(guest, self.guest)
    }
}

pub(crate) fn need_tun() -> Result<()> {
    need_root("create a tap")?;
    load_modules(&["tun", "bridge"]);
    if Path::new("/dev/net/tun").exists() { Ok(()) } else { skip("no /dev/net/tun here") }
}

/// Waits until the guest's driver has found the interface, and assigns an address to it.
fn bring_up(guest: &Guest, address: Ipv4Addr) -> Result<()> {
    bring_up_as(guest, "eth0", address)
}

fn bring_up_as(guest: &Guest, name: &str, address: Ipv4Addr) -> Result<()> {
    guest.wait_until_run(
        "the interface exists",
        IO_LIMIT,
        &format!("test -e /sys/class/net/{name}"),
    )?;
    guest.run(&format!("ip addr add {address}/24 dev {name} && ip link set {name} up")).map(drop)
}

/// Sends a stream from the guest to the host and checks it.
pub(crate) fn from_guest(guest: &Guest, net: &Net, bytes: usize) -> Result<()> {
    let listener =
        TcpListener::bind((net.host, 0)).context("Cannot listen on the tap's address")?;
    let port = listener.local_addr()?.port();
    let reader = thread::spawn(move || -> Result<usize> {
        let (mut stream, _) = listener.accept()?;
        stream.set_read_timeout(Some(IO_LIMIT))?;
        check_stream(&mut stream)
    });
    let line = std::str::from_utf8(LINE)?.trim();
    guest
        .run_within(IO_LIMIT, &format!("yes {line} | head -c {bytes} | nc {} {port}", net.host))?;
    let received = reader.join().expect("the reader does not panic")?;
    ensure!(received == bytes, "Received {received} of {bytes} bytes from the guest");
    Ok(())
}

fn check_stream(stream: &mut impl Read) -> Result<usize> {
    let mut buffer = vec![0; 1 << 20];
    let expected: Vec<u8> = LINE.iter().copied().cycle().take(buffer.len() + LINE.len()).collect();
    let mut received = 0;
    loop {
        let len = stream.read(&mut buffer)?;
        if len == 0 {
            return Ok(received);
        }
        ensure!(
            buffer[..len] == expected[received % LINE.len()..][..len],
            "Wrong bytes after {received}"
        );
        received += len;
    }
}

/// Starts a listener in the guest that compares the received data. Its own input remains open
/// without data, because busybox' nc on the other side would stop at the end of input.
fn listen(guest: &Guest, bytes: usize) -> Result<Script> {
    let line = std::str::from_utf8(LINE)?.trim();
    let script = format!(
        "test -p /tmp/silence || mkfifo /tmp/silence; nc -l -p 5001 0<>/tmp/silence >/tmp/got && \
         yes {line} | head -c {bytes} | cmp - /tmp/got"
    );
    let reader = guest.start_script(IO_LIMIT, &script)?;
    guest.wait_until_run("the guest listens", IO_LIMIT, "netstat -ltn | grep -q :5001")?;
    Ok(reader)
}

pub(crate) fn to_guest(guest: &Guest, net: &Net, bytes: usize) -> Result<()> {
    send(guest, net, |sent| bytes - sent)
}

/// An event that threads wait for.
#[derive(Default)]
pub(crate) struct Done(Mutex<bool>, Condvar);

impl Done {
    pub(crate) fn set(&self) {
        *self.0.lock().expect("no holder panics") = true;
        self.1.notify_all();
    }

    fn is_set(&self) -> bool {
        *self.0.lock().expect("no holder panics")
    }

    fn wait(&self) {
        let is_set = self.0.lock().expect("no holder panics");
        drop(self.1.wait_while(is_set, |is_set| !*is_set).expect("no holder panics"));
    }
}

/// Sends data from the host until `done`, and checks it in the guest. After
/// [`MAX_TRANSFER_BYTES`], the connection remains open without data.
pub(crate) fn to_guest_until(guest: &Guest, net: &Net, done: &Done) -> Result<()> {
    send(guest, net, |sent| {
        if sent >= MAX_TRANSFER_BYTES {
            done.wait();
        }
        if done.is_set() { 0 } else { MAX_TRANSFER_BYTES - sent }
    })
}

/// Sends data as long as `left`, called with the number of bytes sent, returns more than 0. The
/// guest compares the received data.
fn send(guest: &Guest, net: &Net, left: impl Fn(usize) -> usize) -> Result<()> {
    let line = std::str::from_utf8(LINE)?.trim();
    let check = format!(
        "nc -l -p 5001 </dev/null >/tmp/got && got=$(wc -c </tmp/got) && \
         yes {line} | head -c $got | cmp - /tmp/got && rm /tmp/got && echo $got"
    );
    let reader = guest.start_script(IO_LIMIT, &check)?;
    guest.wait_until_run("the guest listens", IO_LIMIT, "netstat -ltn | grep -q :5001")?;
    let mut stream = TcpStream::connect((net.guest, 5001))?;
    let block: Vec<u8> = LINE.iter().copied().cycle().take(LINE.len() << 14).collect();
    let mut sent = 0;
    loop {
        let now = left(sent).min(block.len());
        if now == 0 {
            break;
        }
        stream.write_all(&block[..now])?;
        sent += now;
    }
    drop(stream);
    let output = reader.finish()?;
    ensure!(output.code == 0, "The guest received other data: {}", output.stderr);
    ensure!(
        output.stdout.trim() == sent.to_string(),
        "Received {} of {sent} bytes",
        output.stdout.trim()
    );
    Ok(())
}

/// Unbinds the driver and binds it again. The device should then work like a new one.
pub(crate) fn rebind_driver(guest: &Guest, net: &Net) -> Result<()> {
    guest.run(
        "echo virtio$(basename $(readlink /sys/class/net/eth0/device) | tr -dc 0-9) >/tmp/name",
    )?;
    guest.run(
        "cat /tmp/name >/sys/bus/virtio/drivers/virtio_net/unbind && ! test -e /sys/class/net/eth0",
    )?;
    guest.run("cat /tmp/name >/sys/bus/virtio/drivers/virtio_net/bind")?;
    net.bring_up(guest)?;
    ping_host(guest, net)
}

/// Sends two streams concurrently. The driver uses the queues of two CPUs for them.
pub(crate) fn from_guest_by_two_queues(guest: &Guest, net: &Net, bytes: usize) -> Result<()> {
    let queues = guest.run("ls -d /sys/class/net/eth0/queues/rx-* | wc -l")?;
    ensure!(queues.trim() == "2", "The interface has {} queues", queues.trim());
    thread::scope(|scope| {
        let each = [0, 1].map(|_| scope.spawn(|| from_guest(guest, net, bytes)));
        each.into_iter().try_for_each(|one| one.join().expect("a transfer does not panic"))
    })
}

pub(crate) fn ping_host(guest: &Guest, net: &Net) -> Result<()> {
    guest.run_within(IO_LIMIT, &format!("ping -A -c 5 -W 20 {}", net.host))?;
    guest.run_within(IO_LIMIT, &format!("ping -A -c 3 -W 20 -s 20000 {}", net.host))?;
    Ok(())
}

/// Checks that data was transferred in both directions without errors.
fn check_metrics(guest: &Guest, min_bytes: usize) -> Result<()> {
    let metrics = guest.metrics()?;
    for direction in ["from-guest", "to-guest"] {
        let labels = [("net", "_net0"), ("direction", direction)];
        let bytes = metrics.value("foreshore_net_bytes_total", &labels)?;
        ensure!(bytes >= min_bytes as f64, "The metrics count only {bytes} bytes {direction}");
        ensure!(
            metrics.value("foreshore_net_frames_total", &labels)? > 0.0,
            "The metrics count no frames {direction}"
        );
    }
    for counter in ["foreshore_net_bad_requests_total", "foreshore_net_broken_queues_total"] {
        ensure!(metrics.value(counter, &[("net", "_net0")])? == 0.0, "{counter}");
    }
    Ok(())
}

/// Checks that `transfer` uses segments longer than a frame, according to their average length.
fn has_long_segments(
    guest: &Guest,
    direction: &str,
    transfer: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let counted = || -> Result<(f64, f64)> {
        let (metrics, labels) = (guest.metrics()?, [("net", "_net0"), ("direction", direction)]);
        let value = |name| metrics.value(name, &labels);
        Ok((value("foreshore_net_bytes_total")?, value("foreshore_net_frames_total")?))
    };
    let (bytes_before, frames_before) = counted()?;
    transfer()?;
    let (bytes, frames) = counted()?;
    let (bytes, frames) = (bytes - bytes_before, frames - frames_before);
    ensure!(bytes / frames > FRAME_BYTES, "{direction}: {bytes} bytes in {frames} frames");
    Ok(())
}

fn a_guest_and_its_host_talk_over_a_tap() -> Result<()> {
    let net = Net::new(1)?;
    let guest = net.builder("").boot()?;
    net.bring_up(&guest)?;
    let sys = |file: &str| {
        Ok::<_, anyhow::Error>(
            guest.run(&format!("cat /sys/class/net/eth0/{file}"))?.trim().to_owned(),
        )
    };
    ensure!(sys("address")? == "02:f5:00:00:00:01", "The address is {}", sys("address")?);
    ensure!(
        (sys("mtu")?, sys("carrier")?) == ("1500".to_owned(), "1".to_owned()),
        "{} {}",
        sys("mtu")?,
        sys("carrier")?
    );
    ping_host(&guest, &net)?;
    has_long_segments(&guest, "from-guest", || from_guest(&guest, &net, TRANSFER_BYTES))?;
    has_long_segments(&guest, "to-guest", || to_guest(&guest, &net, TRANSFER_BYTES))?;
    check_metrics(&guest, TRANSFER_BYTES)?;
    let info = guest.get("vm.info")?;
    ensure!(info["config"]["net"][0]["tap"] == net.tap.as_str(), "{info}");
    // A device of a paused VM is idle, and works again after the pause.
    guest.command("vm.pause")?;
    guest.command("vm.resume")?;
    ping_host(&guest, &net)?;
    rebind_driver(&guest, &net)?;
    guest.no_kernel_complaints()?;
    guest.power_off()
}

fn frames_pass_without_offloads_and_with_small_rings() -> Result<()> {
    let net = Net::new(3)?;
    let options = ",mtu=4000,queue_size=32,offload_csum=off,offload_tso=off,offload_ufo=off";
    let guest = net.builder(options).boot()?;
    net.bring_up(&guest)?;
    ensure!(guest.run("cat /sys/class/net/eth0/mtu")?.trim() == "4000", "The MTU");
    ping_host(&guest, &net)?;
    from_guest(&guest, &net, TRANSFER_BYTES / 8)?;
    to_guest(&guest, &net, TRANSFER_BYTES / 8)?;
    check_metrics(&guest, TRANSFER_BYTES / 8)?;
    guest.no_kernel_complaints()
}

fn several_queues_are_used() -> Result<()> {
    let net = Net::new(4)?;
    let guest = net.builder(",num_queues=4").boot()?;
    net.bring_up(&guest)?;
    ping_host(&guest, &net)?;
    // By default, the driver uses one queue per CPU.
    from_guest_by_two_queues(&guest, &net, TRANSFER_BYTES / 8)?;
    to_guest(&guest, &net, TRANSFER_BYTES / 8)?;
    let threads: Vec<_> = std::fs::read_dir(format!("/proc/{}/task", guest.pid()))?
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .collect();
    for name in ["_net0_qp0", "_net0_qp1"] {
        ensure!(
            threads.iter().any(|thread| thread == name),
            "Thread {name} is not among {threads:?}"
        );
    }
    guest.no_kernel_complaints()
}

fn two_guests_talk_over_a_bridge_before_and_after_a_reboot() -> Result<()> {
    need_tun()?;
    let _bridge = Bridge::create("fsbr5")?;
    let boot = |name: &str, tap: &str, mac: &str, kernel| {
        let option = format!("tap={tap},mac={mac}");
        Guest::builder()
            .name(name)
            .kernel(kernel)
            .memory("size=384M")
            .pressure("off")
            .argument("--net", &option)
            .boot()
    };
    let (address_a, address_b) = (Ipv4Addr::new(172, 30, 5, 10), Ipv4Addr::new(172, 30, 5, 11));
    let a = boot("a", "fsa5", "02:f5:00:00:05:0a", Kernel::V6_12)?;
    let b = boot("b", "fsb5", "02:f5:00:00:05:0b", Kernel::V6_1)?;
    host::run("brctl addif fsbr5 fsa5 && brctl addif fsbr5 fsb5")?;
    bring_up(&a, address_a)?;
    bring_up(&b, address_b)?;
    let talk = || -> Result<()> {
        a.run_within(IO_LIMIT, &format!("ping -A -c 5 -W 20 {address_b}"))?;
        let line = std::str::from_utf8(LINE)?.trim();
        for (from, to, to_address) in [(&a, &b, address_b), (&b, &a, address_a)] {
            let bytes = TRANSFER_BYTES;
            let reader = listen(to, bytes)?;
            from.run_within(
                IO_LIMIT,
                &format!("yes {line} | head -c {bytes} | nc {to_address} 5001"),
            )?;
            let output = reader.finish()?;
            ensure!(output.code == 0, "A guest received other data: {}", output.stderr);
        }
        Ok(())
    };
    talk()?;
    // The tap remains in the bridge, because it belongs to the VM instead of the machine.
    a.reboot_from_inside()?;
    bring_up(&a, address_a)?;
    talk()?;
    a.no_kernel_complaints()?;
    b.no_kernel_complaints()
}

fn a_tap_that_goes_away_is_a_link_that_is_down() -> Result<()> {
    check_lost_tap(&Net::new(6)?, "", "")
}

/// `check` is shell code that precedes each check of the link.
pub(crate) fn check_lost_tap(net: &Net, more: &str, check: &str) -> Result<()> {
    let guest = net.builder(more).boot()?;
    net.bring_up(&guest)?;
    ping_host(&guest, net)?;
    host::run(&format!("ip link del {}", net.tap))?;
    let is_down = format!("{check}test $(cat /sys/class/net/eth0/carrier) = 0");
    guest.wait_until_run("the link is down", IO_LIMIT, &is_down)?;
    guest.no_kernel_complaints()?;
    // The next boot creates the tap again.
    guest.reboot_from_inside()?;
    net.bring_up(&guest)?;
    ping_host(&guest, net)?;
    guest.power_off()
}

fn interfaces_other_than_taps_are_refused() -> Result<()> {
    need_tun()?;
    for (option, text) in [
        ("tap=lo", "cannot attach to the interface lo"),
        ("fd=1000", "fd=1000 is not open"),
        ("num_queues=4", "num_queues is 4"),
        ("vhost_user=on", "vhost-user is not implemented"),
    ] {
        let refusal = Guest::builder().argument("--net", option).expect_refusal()?;
        ensure!(refusal.message.contains(text), "{option}: {}", refusal.message);
    }
    // An existing VM should refuse these interfaces too, whether it runs or not.
    let vmm = api::empty_vmm()?;
    vmm.put("vm.create", api::config(&vmm))?;
    for boots in [true, false] {
        let file = || File::open("/dev/null").map(|file| vec![file]);
        let plain = |name| tap::open_with(name, 1, 0);
        for (body, files, text) in [
            (json!({}), file()?, "is not a tap interface"),
            (json!({}), plain("fstap7")?, "without IFF_VNET_HDR"),
            (json!({"fds": "3"}), Vec::new(), "JSON cannot carry file descriptors"),
        ] {
            let answer = add_with(&mut connect(&vmm)?, &body, &files)?;
            ensure!(answer.status == 400 && answer.body.contains(text), "{body}: {answer:?}");
        }
        let info = vmm.get("vm.info")?;
        ensure!(info["config"]["net"].as_array().is_none_or(Vec::is_empty), "{info}");
        if boots {
            vmm.command("vm.boot")?;
        }
    }
    vmm.wait_until("everything is closed", IO_LIMIT, || {
        Ok(!Path::new("/sys/class/net/fstap7").exists())
    })
}

fn connect(vmm: &Guest) -> Result<UnixStream> {
    UnixStream::connect(vmm.api_socket()).context("Cannot connect to the API")
}

fn add_with(stream: &mut UnixStream, body: &Value, files: &[File]) -> Result<Response> {
    http::request_with(stream, "vm.add-net", &body.to_string(), files)
}

/// Adds interfaces over one connection, as libvirt does.
fn passed_queues_work_from_the_first_boot_to_their_removal() -> Result<()> {
    let (first, second) = (Net::new(8)?, Net::new(9)?);
    let vmm = api::empty_vmm()?;
    vmm.put("vm.create", api::config(&vmm))?;
    let mut connection = connect(&vmm)?;
    for (id, net, mac) in
        [("net_0", &first, "02:f5:00:00:08:01"), ("net_1", &second, "02:f5:00:00:08:02")]
    {
        let body =
            json!({"id": id, "ip": net.host, "mask": "255.255.255.0", "mac": mac, "num_queues": 2});
        let answer = add_with(&mut connection, &body, &net.open(1)?)?;
        ensure!((answer.status, &*answer.body) == (204, ""), "{answer:?}");
    }
    vmm.command("vm.boot")?;
    vmm.wait_for_shell(BOOT_LIMIT)?;
    let info = vmm.get("vm.info")?;
    ensure!(info["config"]["net"][1]["fds"] == json!([-1]), "{info}");
    ensure!(info["device_tree"]["net_1"]["parent"] == "_virtio-pci-net_1", "{info}");
    first.bring_up(&vmm)?;
    ping_host(&vmm, &first)?;
    for round in 0..3 {
        if round == 1 {
            vmm.command("vm.shutdown")?;
            ensure!(first.exists(), "The queues of the tap are closed");
            vmm.command("vm.boot")?;
        } else {
            vmm.command("vm.reboot")?;
        }
        vmm.wait_for_shell(BOOT_LIMIT)?;
        first.bring_up(&vmm)?;
        ping_host(&vmm, &first)?;
        from_guest(&vmm, &first, TRANSFER_BYTES / 16)?;
    }
    // One interface is removed while the guest runs, and the other while no guest runs.
    let remove = |id: &str| vmm.put("vm.remove-device", json!({ "id": id }));
    remove("net_1")?;
    vmm.wait_until("the queues of the tap are closed", IO_LIMIT, || Ok(!second.exists()))?;
    ping_host(&vmm, &first)?;
    vmm.no_kernel_complaints()?;
    vmm.command("vm.shutdown")?;
    remove("net_0")?;
    vmm.wait_until("the queues of the tap are closed", IO_LIMIT, || Ok(!first.exists()))
}

pub(crate) fn builder() -> GuestBuilder {
    Guest::builder().memory("size=384M").pressure("off")
}

/// Adds a NIC by name, or with a passed queue.
pub(crate) fn add_net(guest: &Guest, net: &Net, id: &str, by_fd: bool) -> Result<Value> {
    // The previous interface should have been closed.
    guest.wait_until("the interface is free", IO_LIMIT, || Ok(!net.exists()))?;
    if by_fd {
        let body = json!({"id": id, "mac": "02:f5:00:00:00:01"});
        let answer = add_with(&mut connect(guest)?, &body, &net.open(1)?)?;
        ensure!(answer.status == 200, "{answer:?}");
        return Ok(serde_json::from_str(&answer.body)?);
    }
    let body = json!({"id": id, "tap": net.tap, "ip": net.host, "mask": "255.255.255.0"});
    guest.put("vm.add-net", body)
}

fn an_interface_comes_carries_traffic_and_goes() -> Result<()> {
    let net = Net::new(10)?;
    let guest = builder().boot()?;
    for by_fd in [true, false, true] {
        let added = add_net(&guest, &net, "lan", by_fd)?;
        ensure!(added["id"] == "lan", "{added}");
        net.bring_up(&guest)?;
        ping_host(&guest, &net)?;
        from_guest(&guest, &net, TRANSFER_BYTES / 16)?;
        to_guest(&guest, &net, TRANSFER_BYTES / 16)?;
        let counters = guest.get("vm.counters")?;
        for name in ["rx_bytes", "tx_bytes"] {
            ensure!(
                counters["lan"][name].as_u64() > Some(TRANSFER_BYTES as u64 / 16),
                "{name}: {counters}"
            );
        }
        ensure!(counters["lan"]["rx_frames"].as_u64() > Some(0), "{counters}");
        let frames = [("net", "lan"), ("direction", "to-guest")];
        ensure!(
            guest.metric("foreshore_net_frames_total", &frames)? > 0.0,
            "The metrics count no frames"
        );
        guest.put("vm.remove-device", json!({"id": "lan"}))?;
        guest.wait_until_run(
            "the guest has ejected the device",
            IO_LIMIT,
            "! test -e /sys/class/net/eth0",
        )?;
        guest.wait_until("the tap is removed", IO_LIMIT, || Ok(!net.exists()))?;
        ensure!(
            guest.metric("foreshore_net_frames_total", &frames).is_err(),
            "The metrics still count the device"
        );
        ensure!(guest.get("vm.counters")? == json!({}), "vm.counters still has the device");
    }
    guest.no_kernel_complaints()
}

/// Continuously sends frames to a guest, without expecting an answer.
struct Sender {
    /// Dropped to end the thread.
    end: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Sender {
    fn start(net: &Net) -> Result<Self> {
        let (socket, (end, ended)) = (UdpSocket::bind((net.host, 0))?, mpsc::channel());
        // A static ARP entry is needed, because a guest without bus mastering does not answer ARP
        // requests.
        host::run(&format!("arp -i {} -s {} 02:f5:00:00:00:01", net.tap, net.guest))?;
        let guest = net.guest;
        let thread = thread::spawn(move || {
            while ended.recv_timeout(Duration::from_millis(1)) == Err(RecvTimeoutError::Timeout) {
                // An error is ignored, because the guest's port is closed and the tap may be full.
                let _ = socket.send_to(&[0x5a; 1024], (guest, 5002));
            }
        });
        Ok(Self { end: Some(end), thread: Some(thread) })
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.end = None;
        self.thread.take().map(JoinHandle::join);
    }
}

pub(crate) fn tap_frames(net: &Net) -> Result<u64> {
    let path = format!("/sys/class/net/{}/statistics/tx_packets", net.tap);
    std::fs::read_to_string(path)?.trim().parse().context("Not a number of frames")
}

/// Disables bus mastering of a NIC that receives frames, as Linux does before it starts a kernel
/// with kexec (`pci_clear_master`). Then a newly bound driver enables it again.
pub(crate) fn check_lost_bus_mastering(net: &Net, more: &str) -> Result<()> {
    let guest = net.builder(more).boot()?;
    net.bring_up(&guest)?;
    ping_host(&guest, net)?;
    guest.run("basename $(dirname $(readlink -f /sys/class/net/eth0/device)) >/tmp/function")?;
    let _sender = Sender::start(net)?;
    let frames_arrive = |description: &str| {
        let before = tap_frames(net)?;
        guest.wait_until(description, IO_LIMIT, || Ok(tap_frames(net)? > before + 100))
    };
    frames_arrive("frames arrive")?;
    // Enables memory space without bus mastering: sets bit 1 of the command register and clears bit
    // 2. The device has stopped when the write returns.
    guest.run(
        "printf '\\002' | dd of=/sys/bus/pci/devices/$(cat /tmp/function)/config bs=1 seek=4 conv=notrunc",
    )?;
    let at_the_end = tap_frames(net)?;
    let ping = guest.try_run(IO_LIMIT, &format!("ping -c 5 -W 1 {}", net.host))?;
    ensure!(ping.code != 0, "The host answered: {}", ping.stdout);
    let later = tap_frames(net)?;
    ensure!(later == at_the_end, "The device sent {} frames after the end", later - at_the_end);
    let driver = "/sys/bus/pci/drivers/virtio-pci";
    guest.run_within(
        IO_LIMIT,
        &format!("cat /tmp/function >{driver}/unbind && ! test -e /sys/class/net/eth0"),
    )?;
    guest.run(&format!("cat /tmp/function >{driver}/bind"))?;
    net.bring_up(&guest)?;
    ping_host(&guest, net)?;
    frames_arrive("frames arrive again")?;
    guest.no_kernel_complaints()?;
    guest.power_off()
}

fn a_nic_without_the_bus_is_silent_until_its_driver_comes_back() -> Result<()> {
    let net = Net::new(12)?;
    check_lost_bus_mastering(&net, "")
}
