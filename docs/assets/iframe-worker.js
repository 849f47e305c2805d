// Browsers start no workers from files. Where the site is opened from disk, the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = this.onerror = null
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.frame = frame
      const inside = frame.contentWindow
      inside.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      inside.importScripts = (...urls) => urls.reduce((before, one) => before.then(() => this.load(one)), Promise.resolve())
      this.ready = this.load(url)
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const page = this.frame.contentDocument
        const script = page.createElement("script")
        script.src = new URL(url, location.href).href
        script.onload = resolve
        script.onerror = reject
        page.body.append(script)
      })
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
