//! Tests of mapped thin volumes that may be larger than their pool. A store that finds no space
//! waits, and the VM is paused.

use std::fs;
use std::slice;

use anyhow::{Context, Result, ensure};
use guest_tests::disk::sparse_file;
use guest_tests::pool::pmvol;
use guest_tests::user::need_root;
use guest_tests::{BOOT_LIMIT, Guest, Pool};
use serde_json::json;

use crate::firmware::{elf, with_firmware, write};
use crate::volume::{IO_LIMIT, wait_for_disk};
use crate::volume_thin::{
    USERFAULTS, full_writes, grow_until_written, wait_until_paused, write_beyond_the_pool,
};
use crate::zones::MIB;

guest_tests::tests![
    store_in_a_full_pool_pauses_the_vm_until_it_grows: 400 on [V6_12, V6_1 extended] x 2 =>
        store_pauses_the_vm_until_the_pool_grows("nvdimm"),
    store_by_virtio_pmem_pauses_the_vm_until_the_pool_grows: 600 (long) =>
        store_pauses_the_vm_until_the_pool_grows("virtio-pmem"),
    vm_with_a_store_without_space_restarts_and_ends: 400 x 2,
    store_without_interrupts_waits_for_the_pool on none,
    vm_with_a_store_without_interrupts_ends on none,
    emulated_store_in_a_full_pool_fails on none,
];

const DEVICE: &str = "/dev/pmem0s";

/// Adds a pmem file, for which KVM needs a memory slot.
fn add_slot(guest: &Guest, id: &str) -> Result<()> {
    let file = sparse_file(id, 2 * MIB)?;
    guest.put("vm.add-pmem", json!({ "file": file, "id": id })).map(drop)
}

/// Checks that requests are answered while a store waits in the paused VM, and again while the
/// guest runs although the pool is full.
fn check_answers_while_a_store_waits(guest: &Guest) -> Result<()> {
    wait_until_paused(guest)?;
    add_slot(guest, "paused")?;
    // The answer means that no vCPU is in the guest.
    guest.command("vm.pause")?;
    guest.command("vm.resume")?;
    add_slot(guest, "running")?;
    ensure!(full_writes(guest)? > 0.0, "No store found the pool full");
    wait_until_paused(guest)
}

fn store_pauses_the_vm_until_the_pool_grows(interface: &str) -> Result<()> {
    need_root(USERFAULTS)?;
    let pool = Pool::create("192M")?;
    let (guest, script) = write_beyond_the_pool(&pool, &format!("interface={interface}"), DEVICE)?;
    check_answers_while_a_store_waits(&guest)?;
    let volume = &guest.get("vm.volumes")?["volumes"][0];
    ensure!(volume["reserve_bytes"] == 32 * MIB, "{volume}");
    grow_until_written(guest, script, &pool, DEVICE)
}

fn wait_for_disk_after_boot(guest: &Guest) -> Result<()> {
    guest.wait_for_shell(BOOT_LIMIT)?;
    wait_for_disk(guest)
}

/// Reboots when no more is written to the disk. Linux reboots on the first CPU, and another one
/// stores.
const REBOOT_WITHOUT_PROGRESS: &str = "taskset 1 sh -c 'old=; sleep 1; \
    while new=$(awk \"{print \\$7}\" /sys/block/pmem0s/stat); [ \"$new\" != \"$old\" ]; do \
    old=$new; sleep 1; done; reboot -f'";

/// Resumes the VM until its guest has rebooted.
fn reboot_while_the_store_waits(guest: &Guest) -> Result<()> {
    let boots = || anyhow::Ok(guest.console_log()?.matches("foreshore-guest: ready").count());
    let before = boots()?;
    guest.wait_until("the guest has rebooted", 2 * BOOT_LIMIT, || {
        if guest.get("vm.info")?["state"] == "Paused" {
            guest.command("vm.resume")?;
        }
        Ok(boots()? > before)
    })
}

/// The end of a machine ends the wait, although the pool has no space.
fn vm_with_a_store_without_space_restarts_and_ends() -> Result<()> {
    need_root(USERFAULTS)?;
    let pool = Pool::create("192M")?;
    let (guest, script) = write_beyond_the_pool(&pool, "interface=nvdimm", DEVICE)?;
    wait_until_paused(&guest)?;
    drop(script);
    guest.command("vm.reboot")?;
    // More than the pool has.
    let dd = format!("taskset 2 dd if=/dev/zero of={DEVICE} bs=1M seek=200 count=256 oflag=direct");
    let store = |command: &str| {
        wait_for_disk_after_boot(&guest)?;
        let script = guest.start_script(IO_LIMIT, command)?;
        wait_until_paused(&guest)?;
        anyhow::Ok(script)
    };
    let script = store(&format!("{REBOOT_WITHOUT_PROGRESS} & {dd}"))?;
    reboot_while_the_store_waits(&guest)?;
    drop(script);
    let script = store(&dd)?;
    guest.command("vm.shutdown")?;
    drop(script);
    guest.command("vm.boot")?;
    let script = store(&dd)?;
    guest.command("vm.resume")?;
    guest.kill_now()?;
    drop(script);
    guest.kill9()?;
    pool.check().map(drop)
}

/// Number of chunks into which the firmware stores. The firmware has it as a constant.
const STORED_CHUNKS: u32 = 24;
/// Word in the first stored chunk. The others have the following words.
const FIRST_WORD: u32 = 0x5a17_0000;

// PVH enters the code in 32-bit protected mode, with interrupts disabled. The code maps the first
// 2 MiB of memory, and then the NVDIMM, which is at 4 GiB. It stores a word into each of the
// NVDIMM's chunks, checks all words and powers off. Its addresses are relative to 0x101000.
std::arch::global_asm!(
    r#"
    .pushsection .rodata.storing_firmware, "a"
    .code32
storing_firmware:
    mov $0x80000, %esp
    cld
    // The table of directories at 0x70000, and the first directory at 0x71000.
    mov $0x70000, %edi
    xor %eax, %eax
    mov $0x800, %ecx
    rep stosl
    movl $0x71001, 0x70000
    // Present, writable pages of 2 MiB.
    movl $0x83, 0x71000
    xor %ecx, %ecx
2:
    mov %ecx, %eax
    shl $21, %eax
    or $0x83, %eax
    mov %eax, 0x71008(,%ecx,8)
    movl $1, 0x7100c(,%ecx,8)
    inc %ecx
    cmp $24, %ecx
    jne 2b
    mov %cr4, %eax
    or $0x20, %eax
    mov %eax, %cr4
    mov $0x70000, %eax
    mov %eax, %cr3
    mov %cr0, %eax
    or $0x80000000, %eax
    mov %eax, %cr0
    mov $(storing_firmware_started - storing_firmware + 0x101000), %esi
    call storing_firmware_puts
    xor %ecx, %ecx
3:
    call storing_firmware_place
    cmpb $0, storing_firmware_is_emulated - storing_firmware + 0x101000
    jne 7f
    mov %edx, (%eax)
    jmp 10f
7:
    // KVM emulates this, and stores the value of the port itself.
    mov %eax, %edi
    mov $0x71, %dx
    insb
10:
    inc %ecx
    cmp $24, %ecx
    jne 3b
    xor %ecx, %ecx
4:
    call storing_firmware_place
    cmp %edx, (%eax)
    jne 9f
    inc %ecx
    cmp $24, %ecx
    jne 4b
    mov $(storing_firmware_done - storing_firmware + 0x101000), %esi
    call storing_firmware_puts
9:
    // Sleep state 5.
    mov $0x34, %al
    mov $0x600, %dx
    out %al, %dx
8:
    hlt
    jmp 8b

// EAX = the address in chunk ECX, after the first info block of a BTT. EDX = the word there.
storing_firmware_place:
    mov %ecx, %eax
    shl $21, %eax
    add $0x202000, %eax
    lea 0x5a170000(%ecx), %edx
    ret

storing_firmware_puts:
    mov $0x3f8, %dx
5:
    lodsb
    test %al, %al
    jz 6f
    out %al, %dx
    jmp 5b
6:
    ret

storing_firmware_started: .asciz "firmware: stores\n"
storing_firmware_done: .asciz "firmware: done\n"
// Set by the test.
storing_firmware_is_emulated: .byte 0
storing_firmware_end:
    .code64
    .global STORING_FIRMWARE_BYTES
    .global STORING_FIRMWARE_LEN
    .popsection
    .pushsection .data.storing_firmware, "aw"
    .balign 8
STORING_FIRMWARE_BYTES: .quad storing_firmware
STORING_FIRMWARE_LEN: .quad storing_firmware_end - storing_firmware
    .popsection
    "#,
    options(att_syntax)
);

unsafe extern "C" {
    static STORING_FIRMWARE_BYTES: *const u8;
    static STORING_FIRMWARE_LEN: usize;
}

/// Starts a VM whose firmware stores more than the pool has.
fn start_firmware(pool: &Pool, is_emulated: bool) -> Result<Guest> {
    // SAFETY: the assembler defines both constants: the start of the code in read-only data, and
    // its length.
    let code = unsafe { slice::from_raw_parts(STORING_FIRMWARE_BYTES, STORING_FIRMWARE_LEN) };
    let mut code = code.to_vec();
    *code.last_mut().context("No code")? = is_emulated.into();
    pmvol(&["volume", "create", &pool.name(), "other", "--size", "32M"])?;
    let path = write("firmware.elf", &elf(&code))?;
    let volume = "size=64M,create=on,thin=on,reserve=4M,interface=nvdimm";
    let guest = with_firmware(&path)
        .memory("size=128M")
        .pressure("off")
        .pm_volume(&format!("pool={},name=data,{volume}", pool.name()))
        .start()?;
    guest.wait_until("the API is served", IO_LIMIT, || Ok(guest.get("vmm.ping").is_ok()))?;
    Ok(guest)
}

/// KVM cannot halt a vCPU without interrupts. If it waited in the kernel, it would hold a lock that
/// changes of memory slots need.
fn store_without_interrupts_waits_for_the_pool() -> Result<()> {
    need_root(USERFAULTS)?;
    let pool = Pool::create("64M")?;
    let guest = start_firmware(&pool, false)?;
    check_answers_while_a_store_waits(&guest)?;
    guest.put("pool.grow", json!({ "path": pool.name(), "size": 128 * MIB }))?;
    let console = guest.console_file();
    let status = guest.wait_for_exit(IO_LIMIT)?;
    let text = fs::read_to_string(console)?;
    ensure!(status.success() && text.contains("firmware: done"), "{status}: {text}");
    // A store that did not wait would be in the VMM's memory only.
    let file = fs::read(pool.path())?;
    let word = |chunk: &[u8]| chunk[0x2000..].first_chunk().copied().map(u32::from_le_bytes);
    let stored: Vec<_> = file.chunks_exact(2 * MIB as usize).filter_map(word).collect();
    let is_stored = |index| stored.contains(&(FIRST_WORD + index));
    ensure!((0..STORED_CHUNKS).all(is_stored), "{stored:x?}");
    Ok(())
}

fn vm_with_a_store_without_interrupts_ends() -> Result<()> {
    need_root(USERFAULTS)?;
    for call in ["vm.shutdown", "vm.delete", "kill"] {
        let pool = Pool::create("64M")?;
        let guest = start_firmware(&pool, false)?;
        wait_until_paused(&guest)?;
        guest.command("vm.resume")?;
        match call {
            "kill" => guest.kill_now()?,
            call => drop(guest.command(call)?),
        }
        guest.kill9()?;
        pool.check()?;
        fs::remove_file(pool.path())?;
    }
    Ok(())
}

/// KVM ends the instruction that it emulates although the store was impossible.
fn emulated_store_in_a_full_pool_fails() -> Result<()> {
    need_root(USERFAULTS)?;
    let pool = Pool::create("64M")?;
    let guest = start_firmware(&pool, true)?;
    guest.wait_until("the store has failed", IO_LIMIT, || {
        let info = guest.get("vm.info")?;
        let reason = info["pause_reason"].as_str().unwrap_or_default();
        Ok(reason.contains("an emulated instruction cannot wait"))
    })?;
    guest.command("vm.shutdown")?;
    guest.kill9()
}
